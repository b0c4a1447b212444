"""Where tensors come from and go to: all that saving and loading know of a plugin.

[Note: sources]
A *model source* lists the model's tensors, each as the elements that this rank holds and the layout that says which
they are. An *optimizer source* lists the states by parameter id, the position in the original optimizer, in the same
way. The two here serve modules and optimizers of plain torch (DDP, FSDP2, none at all);
:class:`ShardedOptimizerSource` serves every optimizer that steps segments and describes them with
``checkpoint_entries()``. A plugin with other layouts brings a source with the same methods, and nothing else.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.interface import ModelWrapper, OptimizerWrapper, PeftUnwrapMixin
from colossalai.interface.model import is_peft_model
from colossalai.tensor import Layout
from colossalai.utils.errors import CheckpointError, ConfigError

MASTER = "master"
"""State key of the fp32 master of a 16-bit parameter."""
EXTRA_STATE = "_extra_state"


@dataclass
class TensorEntry:
    """One tensor of a model: what this rank holds of it."""

    layout: Layout
    local: Tensor
    group: Any = None
    """The ranks that ``layout.intervals`` counts."""
    is_param: bool = True

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass
class StateEntry:
    """The optimizer state of one parameter: what this rank holds of it."""

    param_id: int
    layout: Layout
    group: Any = None
    shape: torch.Size | None = None
    """Shape of what the optimizer steps here, so of state that is cut as the parameter is; None for nothing."""
    state: dict[str, Any] = field(default_factory=dict)


def layout_of(tensor: Tensor, name: str, aliases: tuple[str, ...] = ()) -> tuple[Layout, Tensor, Any]:
    """(layout, this rank's elements, process group) of a plain tensor, or of a DTensor cut along its first dim.

    FSDP2 cuts as ``torch.chunk`` does, so each rank holds whole rows: one flat interval.

    Raises:
        CheckpointError: for a DTensor that is cut in another way.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Layout(name, tensor.shape, None, aliases), tensor, None
    cuts = [(axis, place) for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    local = tensor.to_local()
    if not cuts:
        return Layout(name, tensor.shape, None, aliases), local, None
    axis, place = cuts[0]
    if len(cuts) > 1 or not place.is_shard(0) or type(place).__name__ != "Shard":
        raise CheckpointError(f"{name} is placed as {tensor.placements}: only tensors cut along dim 0 on one mesh axis are read")
    rows, size = tensor.shape[0], mesh.size(axis)
    chunk, width = -(-rows // size), tensor.shape[1:].numel()
    starts = [min(rank * chunk, rows) * width for rank in range(size + 1)]
    return Layout(name, tensor.shape, tuple(zip(starts, starts[1:])), aliases), local, mesh.get_group(axis)


# -- models ------------------------------------------------------------------------------------------------------------


class ModuleSource:
    """The tensors of a torch module, wrapped or not: replicated, or DTensors of FSDP2.

    Args:
        model: a ``ModelWrapper``, a peft model (its base is meant, under its own names), or any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.module = model.unwrap() if isinstance(model, ModelWrapper) else model
        if is_peft_model(self.module):
            self.module = PeftUnwrapMixin(self.module)
        settle = getattr(model, "_force_wait_all_gather", None)
        if settle is not None:  # weights may still be on their way from the last step
            settle()
        self._state = self.module.state_dict(keep_vars=True)

    @property
    def hf_model(self) -> nn.Module | None:
        """The Hugging Face model that this is, else None."""
        model = self.module.base_model if isinstance(self.module, PeftUnwrapMixin) else self.module
        modeling = sys.modules.get("transformers.modeling_utils")  # imported already where this is such a model
        return model if modeling is not None and isinstance(model, modeling.PreTrainedModel) else None

    def entries(self) -> list[TensorEntry]:
        """Parameters, then persistent buffers, in ``state_dict`` order; tied ones once, under their first name."""
        tensors: dict[int, tuple[Tensor, list[str]]] = {}
        for name, value in self._state.items():
            if isinstance(value, Tensor) and not _is_extra(name):
                tensors.setdefault(id(value), (value, []))[1].append(name)
        found = []
        for tensor, names in tensors.values():
            layout, local, group = layout_of(tensor, names[0], tuple(names[1:]))
            found.append(TensorEntry(layout, local, group, isinstance(tensor, nn.Parameter)))
        return sorted(found, key=lambda entry: not entry.is_param)

    def objects(self) -> dict[str, Any]:
        """What modules give as their extra state, by name."""
        return {name: value for name, value in self._state.items() if _is_extra(name) or not isinstance(value, Tensor)}

    def load(self, entry: TensorEntry, full: Tensor) -> None:
        """Copy a whole tensor, or this rank's part of it, into the model, which keeps its dtype."""
        with torch.no_grad():
            if entry.layout.intervals is None:
                entry.local.copy_(full)
            else:
                piece = entry.layout.piece(full, comm.rank(entry.group))
                entry.local.copy_(piece.view(entry.local.shape))

    def load_object(self, name: str, value: Any) -> None:
        """Hand an extra state back to its module."""
        path = name.removesuffix(EXTRA_STATE).rstrip(".")
        module = self.module.base_model if isinstance(self.module, PeftUnwrapMixin) else self.module
        module.get_submodule(path).set_extra_state(value)

    def finish_load(self) -> None:
        """After loading: masters follow the weights."""
        refresh = getattr(self.model, "update_master_params", None)
        if refresh is not None:
            refresh()


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


# -- optimizers --------------------------------------------------------------------------------------------------------


class TorchOptimizerSource:
    """The state of a plain torch optimizer, whose parameters are whole on every rank, or DTensors of FSDP2.

    Args:
        optimizer: it, or a wrapper, whose ``scaler_state()`` is saved and goes to ``load_scaler_state``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.wrapper = optimizer
        self.optimizer = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer

    def _params(self) -> list[tuple[Tensor, dict]]:
        return [(param, group) for group in self.optimizer.param_groups for param in group["params"]]

    def groups(self) -> list[dict]:
        """The param groups with integer ids in place of parameters."""
        groups, start = [], 0
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            stop = start + len(group["params"])
            groups.append({**options, "params": list(range(start, stop))})
            start = stop
        return groups

    def entries(self) -> Iterator[StateEntry]:
        """Every parameter, ids ascending."""
        for param_id, (param, _) in enumerate(self._params()):
            layout, local, group = layout_of(param, f"parameter {param_id}")
            state = {key: _local(value) for key, value in self.optimizer.state.get(param, {}).items()}
            yield StateEntry(param_id, layout, group, local.shape, state)

    def load_groups(self, groups: list[dict]) -> None:
        """Take over the options of saved groups, in place: schedulers may hold the dictionaries."""
        check_groups(groups, [len(group["params"]) for group in self.optimizer.param_groups])
        for group, saved in zip(self.optimizer.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def begin_load(self) -> list[tuple[Tensor, dict]]:
        """Before the first :meth:`load_entry`; returns (parameter, its group) by id."""
        self._targets, self._loaded = self._params(), set()
        return self._targets

    def load_entry(self, param_id: int, state: dict[str, Any]) -> None:
        """Take over one parameter's state, given whole, in the memory of the present one where it fits."""
        param, group = self._targets[param_id]
        before = self.optimizer.state.get(param, {})
        self.optimizer.state[param] = {
            key: _take(before.get(key), key, value, param, group) for key, value in state.items() if key != MASTER
        }
        self._loaded.add(param)

    def finish_load(self) -> None:
        """After the last: what is not in the checkpoint starts anew."""
        for param in set(self.optimizer.state) - self._loaded:
            del self.optimizer.state[param]

    def extra(self) -> dict[str, Any]:
        """What belongs to the optimizer beside states and groups: the loss scaler."""
        return _scaler_of(self.wrapper)

    def load_extra(self, extra: dict[str, Any]) -> None:
        _load_scaler(self.wrapper, extra)


class ShardedOptimizerSource:
    """The state of an optimizer that steps segments of the parameters: LowLevelZeroOptimizer and its like.

    Args:
        optimizer: with ``checkpoint_entries()`` -> (id, layout, segment or None), ``original_groups()``,
            ``shard_group_of(id)``, ``keeps_masters(id)`` and ``update_master_params()``; the segments are the
            parameters of its ``unwrap()``.
    """

    def __init__(self, optimizer: OptimizerWrapper) -> None:
        self.optimizer, self.inner = optimizer, optimizer.unwrap()

    def groups(self) -> list[dict]:
        return self.optimizer.original_groups()

    def entries(self) -> Iterator[StateEntry]:
        """Every trainable parameter, ids ascending; the fp32 master is one more state where there is one."""
        for param_id, layout, segment in self.optimizer.checkpoint_entries():
            group, state, shape = self.optimizer.shard_group_of(param_id), {}, None
            if segment is not None:
                state, shape = dict(self.inner.state.get(segment, {})), segment.shape
                if self.optimizer.keeps_masters(param_id):
                    state[MASTER] = segment.detach()
            yield StateEntry(param_id, layout, group, shape, state)

    def load_groups(self, groups: list[dict]) -> None:
        """Take over the options of saved groups, in place."""
        check_groups(groups, [len(group["params"]) for group in self.groups()])
        for group, saved in zip(self.inner.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def begin_load(self) -> None:
        """Masters are those of the weights, until the checkpoint has better ones."""
        self._targets = {param_id: (layout, segment) for param_id, layout, segment in self.optimizer.checkpoint_entries()}
        self._group_of = {param: group for group in self.inner.param_groups for param in group["params"]}
        self._loaded: set[int] = set()
        self.optimizer.update_master_params()

    def load_entry(self, param_id: int, state: dict[str, Any]) -> None:
        """Take over one parameter's state, given whole; that of a parameter frozen since is not needed."""
        layout, segment = self._targets.get(param_id, (None, None))
        self._loaded.add(param_id)
        if segment is None:
            return
        before, after = self.inner.state.get(segment, {}), {}
        rank = comm.rank(self.optimizer.shard_group_of(param_id))
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == layout.shape:
                piece = layout.piece(value, rank)
                value = layout.unflatten(piece) if segment.shape == layout.shape else piece.view(segment.shape)
            if key != MASTER:
                after[key] = _take(before.get(key), key, value, segment, self._group_of[segment])
            elif self.optimizer.keeps_masters(param_id):
                segment.data.copy_(value)
        self.inner.state[segment] = after

    def finish_load(self) -> None:
        """What is not in the checkpoint starts anew."""
        for param_id, (_, segment) in self._targets.items():
            if param_id not in self._loaded and segment is not None:
                self.inner.state.pop(segment, None)

    def extra(self) -> dict[str, Any]:
        return _scaler_of(self.optimizer)

    def load_extra(self, extra: dict[str, Any]) -> None:
        _load_scaler(self.optimizer, extra)


def optimizer_source(optimizer: Optimizer):
    """The source that fits an optimizer: the segmented one where it describes its segments."""
    if hasattr(optimizer, "checkpoint_entries"):
        return ShardedOptimizerSource(optimizer)
    return TorchOptimizerSource(optimizer)


def check_groups(groups: list[dict], sizes: list[int]) -> None:
    """Raises ConfigError (a ValueError) where number or sizes of saved param groups differ from ``sizes``."""
    found = [len(group["params"]) for group in groups]
    if found != sizes:
        raise ConfigError(
            f"the checkpoint has param groups of {found} parameters, the optimizer of {sizes}: build it with the same groups"
        )


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "device_mesh") else value


def _take(old: Any, key: str, value: Any, param: Tensor, group: dict) -> Any:
    """A saved state value as torch's own loading would place it, in the memory of ``old`` where it fits."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return _overwrite(old, value.to(param.device, torch.float32) if on_device else value)
    dtype = param.dtype if param.is_floating_point() and value.is_floating_point() else value.dtype
    if not hasattr(param, "device_mesh") or value.shape != param.shape or value.dim() == 0:
        return _overwrite(old, value.to(param.device, dtype))
    layout, local, shard_group = layout_of(param, key)
    piece = value if layout.intervals is None else layout.piece(value, comm.rank(shard_group)).view(local.shape)
    piece = piece.to(local.device, dtype)
    if hasattr(old, "device_mesh") and old.placements == param.placements and _fits(old.to_local(), piece):
        old.to_local().copy_(piece)
        return old
    return type(param.data).from_local(
        piece.clone(), param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _fits(old: Any, new: Tensor) -> bool:
    return isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _overwrite(old: Any, new: Tensor) -> Tensor:
    """``new``, which may be the file's own memory, in that of ``old`` where it fits, else as a copy."""
    return old.copy_(new) if _fits(old, new) else new.clone()


def _scaler_of(optimizer: Optimizer) -> dict[str, Any]:
    read = getattr(optimizer, "scaler_state", None)
    state = read() if callable(read) else None
    return {} if state is None else {"scaler": state}


def _load_scaler(optimizer: Optimizer, extra: dict[str, Any]) -> None:
    load = getattr(optimizer, "load_scaler_state", None)
    if callable(load) and extra.get("scaler") is not None:
        load(extra["scaler"])
