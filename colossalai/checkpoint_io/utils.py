"""Names and helpers that scripts import from here; see the modules they come from.

The functions below work on state dicts of one process and take no part in :class:`CheckpointIO`, which streams.
"""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.utils.errors import CheckpointError, ConfigError
from colossalai.utils.safetensors import (
    SafetensorsFile,
    TensorSpec,
    _flatten_optim_state_dict,
    _unflatten_optim_state_dict,
)

from .file_names import (
    GROUP_FILE_NAME,
    SAFE_STATE_NAME,
    SAFE_STATES_INDEX_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    STATES_INDEX_NAME,
    STATES_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    add_prefix,
    get_model_base_filenames,
    get_optimizer_base_filenames,
    get_shard_filename,
    has_index_file,
    shard_pattern,
)
from .hf import save_configuration
from .index_file import CheckpointIndexFile
from .reading import is_safetensors, open_table, read_ahead, read_torch
from .sharder import StateDictSharder, calculate_tensor_size, shard_model_checkpoint, shard_optimizer_checkpoint
from .sources import ModuleSource, TorchOptimizerSource
from .staging import SingleFile
from .writing import plain, save_torch

__all__ = [
    "GROUP_FILE_NAME",
    "SAFE_STATES_INDEX_NAME",
    "SAFE_STATE_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "STATES_INDEX_NAME",
    "STATES_NAME",
    "StateDictSharder",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "_flatten_optim_state_dict",
    "_unflatten_optim_state_dict",
    "add_prefix",
    "calculate_tensor_size",
    "clean_folder",
    "create_pinned_state_dict",
    "gather_distributed_param",
    "gather_state_dict_fast",
    "get_lora_state_dict",
    "get_model_base_filenames",
    "get_optimizer_base_filenames",
    "get_shard_filename",
    "has_index_file",
    "is_safetensors_available",
    "load_param_groups_into_optimizer",
    "load_shard_state_dict",
    "load_state_dict",
    "load_state_dict_into_model",
    "load_state_dict_shards",
    "load_states_into_optimizer",
    "save_config_file",
    "save_param_groups",
    "save_state_dict",
    "save_state_dict_shards",
    "search_padding_dim",
    "search_tp_partition_dim",
    "shard_model_checkpoint",
    "shard_optimizer_checkpoint",
    "sharded_optimizer_loading_epilogue",
]

PathLike = str | Path


def is_safetensors_available() -> bool:
    return importlib.util.find_spec("safetensors") is not None


# -- files -------------------------------------------------------------------------------------------------------------


def save_state_dict(state_dict: dict, checkpoint_file_path: PathLike, use_safetensors: bool = False) -> None:
    """Write a state dict to one file, which is whole or not there; moves tensors to the CPU.

    Raises:
        ConfigError: where ``use_safetensors`` and the path does not end in ``.safetensors``.
    """
    path = Path(checkpoint_file_path)
    if use_safetensors and not is_safetensors(path):
        raise ConfigError(f"use_safetensors=True: checkpoint_file_path={str(path)!r} must end in .safetensors")
    on_cpu = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state_dict.items()}
    file = SingleFile(path)
    try:
        if use_safetensors:
            tensors = {name: value for name, value in on_cpu.items() if isinstance(value, Tensor)}
            out = SafetensorsFile(file.path(path.name), {name: TensorSpec.of(value) for name, value in tensors.items()})
            for name, value in tensors.items():
                out.put(name, value)
            out.close()
        else:
            torch.save(on_cpu, file.path(path.name))
        file.publish()
    except BaseException:
        file.discard()
        raise


def load_state_dict(checkpoint_file_path: PathLike) -> dict:
    """Read one file, safetensors by its suffix, to the CPU."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in open_table(checkpoint_file_path).items()}


def load_shard_state_dict(checkpoint_file: PathLike, use_safetensors: bool = False) -> dict:
    """Read one shard of a model.

    Raises:
        ConfigError: where ``use_safetensors`` and the name does not end in ``.safetensors``.
    """
    if use_safetensors and not is_safetensors(checkpoint_file):
        raise ConfigError(f"use_safetensors=True, but {checkpoint_file} does not end in .safetensors")
    return load_state_dict(checkpoint_file)


def load_state_dict_shards(
    checkpoint_files: list[PathLike],
    is_optim: bool,
    use_safetensors: bool,
    low_cpu_mem_mode: bool = True,
    prefetch: int = 3,
) -> Iterator[dict]:
    """Yields shard after shard; without ``low_cpu_mem_mode`` up to ``prefetch`` of them are read meanwhile."""

    def read(file: PathLike) -> list[tuple[Any, dict]]:
        if is_optim and use_safetensors:
            table = open_table(file)
            content = _unflatten_optim_state_dict(dict(table), table.metadata)
        else:
            content = read_torch(file) if is_optim else load_shard_state_dict(file, use_safetensors)
        return list(content.items()) if is_optim else [("", content)]

    for content in read_ahead(checkpoint_files, read, low_cpu_mem_mode, prefetch):
        yield dict(content) if is_optim else next(iter(content))[1]


def save_state_dict_shards(
    sharded_state_dict: Iterator[tuple[dict, float]],
    checkpoint: PathLike,
    index_file: CheckpointIndexFile,
    base_filename: str,
    is_master: bool,
    use_safetensors: bool = False,
    use_pp_format: bool = False,
) -> float:
    """Write shards that come as (state dict, MiB) and note their tensors in the index; returns the total MiB."""
    total, files = 0.0, []
    for number, (shard, size) in enumerate(sharded_state_dict):
        if not is_master:
            continue
        name = get_shard_filename(base_filename, number)
        if use_pp_format:
            stem, _, extension = base_filename.rpartition(".")
            name = f"{stem}-shard-{number + 1:05d}.{extension}"
        save_state_dict(shard, Path(checkpoint) / name, use_safetensors)
        for key in shard:
            index_file.append_weight_map(key, name)
        files.append(name)
        total += size
    clean_folder(checkpoint, base_filename, files, is_master, use_pp_format)
    return total


def clean_folder(
    checkpoint_path: PathLike,
    weights_name: str,
    shard_filenames: list[str],
    is_master: bool = True,
    use_pp_format: bool = False,
) -> None:
    """Remove numbered shards of ``weights_name`` that are not among ``shard_filenames``."""
    if not is_master:
        return
    # Under a pipeline the base name carries the stage already: the shards of all stages are compared.
    base = weights_name.partition("-stage-")[0] + "." + weights_name.rpartition(".")[2] if use_pp_format else weights_name
    pattern = shard_pattern(base, use_pp_format)
    for path in Path(checkpoint_path).iterdir():
        if pattern.fullmatch(path.name) and path.name not in shard_filenames:
            path.unlink()


def save_config_file(model: nn.Module, checkpoint_path: PathLike, is_master: bool = True) -> None:
    """Write the configuration of a Hugging Face model, and nothing for others."""
    if is_master:
        save_configuration(ModuleSource(model).hf_model, Path(checkpoint_path))


def save_param_groups(state_dict: dict, group_file_path: PathLike) -> None:
    """Write the param groups of an optimizer's state dict."""
    file = SingleFile(Path(group_file_path))
    save_torch(plain(state_dict["param_groups"]), file.path(""))
    file.publish()


# -- into modules and optimizers ---------------------------------------------------------------------------------------


def load_state_dict_into_model(
    model: nn.Module, state_dict: dict, missing_keys: list, strict: bool = False, load_sub_module: bool = True
) -> None:
    """Copy what a state dict has into a module; names that neither has are appended to ``missing_keys``.

    Args:
        missing_keys: extended by the names of the model that the state dict lacks.
        strict: raise CheckpointError for names that the model does not have.
        load_sub_module: False for the parameters and buffers of ``model`` itself only.
    """
    own = model.state_dict(keep_vars=True)
    if not load_sub_module:
        own = {name: value for name, value in own.items() if "." not in name}
    unexpected = [name for name in state_dict if name not in own]
    if strict and unexpected:
        raise CheckpointError(f"unexpected in the state dict of {type(model).__name__}: {', '.join(unexpected[:10])}")
    missing_keys.extend(name for name in own if name not in state_dict)
    for name, value in own.items():
        if name in state_dict and isinstance(value, Tensor):
            if state_dict[name].shape != value.shape:
                raise CheckpointError(f"{name} is {tuple(state_dict[name].shape)}, the model's {tuple(value.shape)}")
            with torch.no_grad():
                value.copy_(state_dict[name])


def load_param_groups_into_optimizer(optimizer: Optimizer, param_group_path: PathLike) -> dict[int, Tensor]:
    """Take over the options of saved groups; returns {parameter id: parameter}.

    Raises:
        ConfigError: (a ValueError) where number or sizes of the groups differ.
    """
    groups = read_torch(param_group_path)
    TorchOptimizerSource(optimizer).load_groups(groups)
    ids = (param_id for group in groups for param_id in group["params"])
    return dict(zip(ids, (param for group in optimizer.param_groups for param in group["params"])))


def load_states_into_optimizer(optimizer: Optimizer, state_dict: dict, id_map: dict[int, Tensor], strict: bool = False) -> None:
    """Take over the states of ``{id: state}``; ids that ``id_map`` lacks raise CheckpointError if ``strict``."""
    source = TorchOptimizerSource(optimizer)
    position = {param: number for number, (param, _) in enumerate(source.begin_load())}
    for param_id, state in state_dict.items():
        param = id_map.get(int(param_id))
        if param is not None:
            source.load_entry(position[param], state)
        elif strict:
            raise CheckpointError(f"parameter id {param_id} is in no param group")


def sharded_optimizer_loading_epilogue(optimizer: Optimizer) -> None:
    """After the last shard: what torch's own ``load_state_dict`` does at its end."""
    patch = getattr(optimizer, "_patch_step_function", None)  # torch's own, private name
    if patch is not None:
        patch()
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


# -- tensors -----------------------------------------------------------------------------------------------------------


def search_tp_partition_dim(current_shape: torch.Size, original_shape: torch.Size, tp_size: int) -> int | None:
    """The dim that was cut into ``tp_size`` equal parts, None where the shapes are equal.

    Raises:
        ConfigError: (an AssertionError) where it was cut unevenly.
    """
    for dim, (current, original) in enumerate(zip(current_shape, original_shape)):
        if original > current:
            if current * tp_size != original:
                raise ConfigError(f"dim {dim} of {tuple(original_shape)} is not cut evenly into {tp_size} parts of {current}")
            return dim
    return None


def search_padding_dim(global_shape: torch.Size, original_shape: torch.Size) -> int | None:
    """The dim that was padded from ``original_shape`` to ``global_shape``, None where they are equal."""
    for dim, (padded, original) in enumerate(zip(global_shape, original_shape)):
        if padded > original:
            return dim
    return None


def gather_distributed_param(param: Tensor, keep_vars: bool = False) -> Tensor:
    """The whole tensor of a parameter, which a DTensor has to be gathered for. Collective."""
    value = param if keep_vars else param.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gather_state_dict_fast(
    state_dict: dict[str, Tensor], group: Any, device: torch.device | None = None, dst: int = 0
) -> dict[str, Tensor] | None:
    """The union of the ranks' state dicts on rank ``dst`` of the group, None elsewhere. Collective."""
    named = {name: value.detach().cpu() for name, value in state_dict.items()}
    parts = comm.gather_object(named, dst=dst, group=group)
    if parts is None:
        return None
    merged = {name: value for part in parts for name, value in part.items()}
    return {name: value if device is None else value.to(device) for name, value in merged.items()}


def create_pinned_state_dict(state_dict: dict[str, Any], empty: bool = True, num_threads: int = 1) -> dict[str, Any]:
    """Host tensors like those of ``state_dict``, which may be nested; pinned where there is a CUDA device.

    Args:
        empty: leave them uninitialised, else copy.
        num_threads: that copy.
    """
    pin = torch.cuda.is_available()

    def make(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin)
        return host if empty else host.copy_(value.detach())

    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        made = {
            key: {inner: pool.submit(make, entry) for inner, entry in value.items()}
            if isinstance(value, dict)
            else pool.submit(make, value)
            for key, value in state_dict.items()
        }
    return {
        key: {inner: entry.result() for inner, entry in value.items()} if isinstance(value, dict) else value.result()
        for key, value in made.items()
    }


def get_lora_state_dict(
    model: nn.Module, state_dict: dict[str, Tensor], adapter_name: str = "default", save_embedding_layers: Any = "auto"
) -> dict[str, Tensor]:
    """What of ``state_dict`` belongs to an adapter, under the names that peft stores."""
    try:
        from peft import get_peft_model_state_dict
    except ImportError as error:
        raise ImportError('get_lora_state_dict needs peft: pip install "colossalai[hf]"') from error
    return get_peft_model_state_dict(model, state_dict, adapter_name=adapter_name, save_embedding_layers=save_embedding_layers)
