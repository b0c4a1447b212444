"""Saving and loading an optimizer: states by parameter id, whole, and param groups with ids in place of parameters."""

import base64
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai import comm
from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import (
    NON_TENSOR_KEYS,
    PARAM_GROUPS,
    TensorSpec,
    decode_value,
    encode_value,
    names_of,
)

from . import file_names as names
from .index_file import CheckpointIndexFile
from .model_io import old_files
from .reading import SafetensorsTable, is_safetensors, read_ahead, read_torch
from .sharder import MIB, pack
from .sources import StateEntry
from .staging import SingleFile, Staging
from .team import Team
from .writing import Background, FilePlan, SaveJob, Writer, plain, save_torch, whole

# Our own entries beside upstream's, whose loaders do not look at them.
_EXTRA = "colossalai_extra"


@dataclass(frozen=True)
class Value:
    """What all ranks know of one state of one parameter.

    ``kind`` is ``"cut"`` (cut as the parameter is), ``"owned"`` (a tensor of another shape, on one rank: the row and
    column factors of Adafactor) or ``"plain"`` (numbers, and tensors of one element such as the step).
    """

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    device: str = "cpu"
    owner: int = 0
    """Rank of the shard group that has an owned tensor."""
    value: Any = None

    @property
    def nbytes(self) -> int:
        return 0 if self.shape is None or self.dtype is None else TensorSpec(self.shape, self.dtype).nbytes


Table = dict[int, dict[str, Value]]


def describe(entries: list[StateEntry], team: Team) -> Table:
    """The states of all parameters, from what each rank has of them; equal on all ranks. Collective.

    Raises:
        CheckpointError: for a state that several ranks have and that cannot be joined.
    """
    alike: dict[bytes, tuple[dict[str, Value], list[int]]] = {}
    for entry in entries:
        values = {key: _describe(value, entry) for key, value in entry.state.items()}
        if values:
            alike.setdefault(pickle.dumps(values), (values, []))[1].append(entry.param_id)
    mine = list(alike.values())  # most parameters have states of the same kinds, so this is short
    everyone = [mine] if team.alone else comm.all_gather_object(mine, group=team.group)
    layouts = {entry.param_id: entry.layout for entry in entries}
    table: Table = {}
    for rank, values, ids in ((rank, *pair) for rank, pairs in enumerate(everyone) for pair in pairs):
        for param_id in ids:
            if rank > 0 and layouts[param_id].intervals is None:
                continue  # the first rank has it whole
            known = table.setdefault(param_id, {})
            for key, value in values.items():
                if value.kind == "cut":
                    value = Value("cut", value.dtype, tuple(layouts[param_id].shape), value.device)
                before = known.setdefault(key, value)
                if "owned" in (before.kind, value.kind) and (before.kind, before.owner) != (value.kind, value.owner):
                    if layouts[param_id].intervals is not None:
                        raise CheckpointError(
                            f"state {key!r} of parameter {param_id} is not cut as the parameter is, and several ranks "
                            "have their own: it cannot be joined to one"
                        )
    return {param_id: table[param_id] for param_id in sorted(table)}


def _describe(value: Any, entry: StateEntry) -> Value:
    if not isinstance(value, Tensor):
        return Value("plain", value=plain(value))
    if value.dim() > 0 and value.shape == entry.shape:
        return Value("cut", value.dtype, None, value.device.type)
    if value.numel() == 1:
        return Value("plain", value.dtype, tuple(value.shape), value=value.item())
    owner = 0 if entry.layout.intervals is None else comm.rank(entry.group)
    return Value("owned", value.dtype, tuple(value.shape), value.device.type, owner)


def join(key: str, value: Value, entry: StateEntry, team: Team) -> tuple[Any, bool]:
    """(one state, whole, on the writing rank; whether it is a copy). Collective."""
    if value.kind == "plain":
        if value.shape is None:
            return value.value, True
        return torch.full(value.shape, value.value, dtype=value.dtype), True
    local = entry.state.get(key)
    if value.kind == "cut" or entry.layout.intervals is None:
        if local is None:
            local = torch.empty(0, dtype=value.dtype, device=value.device)
        return whole(local, entry.layout, entry.group, team) if value.kind == "cut" else (local.detach().cpu(), False)
    sizes = [0] * len(entry.layout.intervals)
    sizes[value.owner] = torch.Size(value.shape).numel()
    mine = comm.rank(entry.group) == value.owner
    piece = local.detach().reshape(-1) if mine else torch.empty(0, dtype=value.dtype, device=value.device)
    flat = comm.gather_pieces(piece, sizes, 0, entry.group)
    return (None if flat is None else flat.view(value.shape).cpu()), True


# -- saving ------------------------------------------------------------------------------------------------------------


def save_sharded(
    source: Any,
    team: Team,
    directory: Path,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    background: Background | None = None,
) -> None:
    """Write shards (in the background safetensors), the param groups, and the index. Collective."""
    use_safetensors = background is not None
    base, index_name, group_name = names.get_optimizer_base_filenames(prefix, use_safetensors)
    entries = {entry.param_id: entry for entry in source.entries()}
    table = describe(list(entries.values()), team)
    ids, sizes = list(table), [sum(v.nbytes for v in values.values()) / MIB for values in table.values()]
    plans, file_of = [], {}
    for number, members in enumerate(pack(sizes, size_per_shard)):
        file = names.get_shard_filename(base, number)
        part = {ids[i]: table[ids[i]] for i in members}
        file_of.update(dict.fromkeys(part, file))
        plans.append(_plan_file(file, part))
    groups, extra = plain(source.groups()), plain(source.extra())
    writer, error = None, None
    if team.writes:
        try:
            writer = Writer(Staging(directory, index_name), plans)
        except Exception as caught:
            error = caught
    team.share(error)

    def write_rest(path) -> dict[str, Any]:
        index = CheckpointIndexFile(path(""))
        index.append_meta_data("total_size", sum(sizes))
        index.append_meta_data("param_groups", group_name)
        save_torch(groups, path(group_name))
        if extra:
            extra_name = names.add_prefix(names.EXTRA_FILE_NAME, prefix)
            index.append_meta_data(_EXTRA, extra_name)
            save_torch(extra, path(extra_name))
        for param_id, file in file_of.items():
            index.append_weight_map(param_id, file)
        index.write_index_file(index_name)
        return old_files(directory, base, index_name, team)

    with SaveJob(team, writer, size_per_shard, background) as job:
        _deliver(table, entries, file_of, team, job)
        job.finish(write_rest)


def save_unsharded(
    source: Any, team: Team, path: Path, use_safetensors: bool = False, background: Background | None = None
) -> None:
    """Write ``{"state": {id: ...}, "param_groups": [...]}`` to one file. Collective."""
    entries = {entry.param_id: entry for entry in source.entries()}
    table = describe(list(entries.values()), team)
    groups, extra = plain(source.groups()), plain(source.extra())
    file = names.SAFE_STATE_NAME if use_safetensors else names.STATES_NAME
    plan = _plan_file(file, table)
    encoded_groups = encode_value(groups) if use_safetensors else None
    if use_safetensors:
        plan.specs[PARAM_GROUPS] = TensorSpec.of(encoded_groups)
        if extra:
            plan.metadata[_EXTRA] = base64.b64encode(bytes(encode_value(extra).tolist())).decode()
    else:
        rest = {PARAM_GROUPS: groups, **({_EXTRA: extra} if extra else {})}
        plan.wrap = lambda states: {"state": states, **rest}
    writer, error = None, None
    if team.writes:
        try:
            writer = Writer(SingleFile(path), [plan])
        except Exception as caught:
            error = caught
    team.share(error)
    with SaveJob(team, writer, float("inf"), background) as job:
        _deliver(table, entries, dict.fromkeys(table, file), team, job)
        if use_safetensors:
            with job.delivering(0):
                job.put(file, PARAM_GROUPS, encoded_groups, True)
        job.finish(lambda _: {})


def _plan_file(file: str, table: Table) -> FilePlan:
    plan, non_tensor = FilePlan(file), []
    for param_id, values in table.items():
        for key, value in values.items():
            spec = None if value.shape is None else TensorSpec(value.shape, value.dtype)
            if not is_safetensors(file):
                plan.specs[param_id, key] = spec
            elif spec is not None:
                plan.specs[f"state.{param_id}.{key}"] = spec
            elif value.value is not None:
                non_tensor.append(f"state.{param_id}.{key}")
                plan.specs[non_tensor[-1]] = TensorSpec.of(encode_value(value.value))
    if non_tensor:
        plan.metadata[NON_TENSOR_KEYS] = json.dumps(non_tensor)
    return plan


def _deliver(table: Table, entries: dict[int, StateEntry], file_of: dict[int, str], team: Team, job: SaveJob) -> None:
    for param_id, values in table.items():
        file = file_of[param_id]
        for key, value in values.items():
            joined, is_copy = join(key, value, entries[param_id], team)
            with job.delivering(value.nbytes):
                if not is_safetensors(file):
                    job.put(file, (param_id, key), joined, is_copy)
                elif isinstance(joined, Tensor):
                    job.put(file, f"state.{param_id}.{key}", joined, is_copy)
                elif joined is not None and job.writes:
                    job.put(file, f"state.{param_id}.{key}", encode_value(joined), True)


# -- loading -----------------------------------------------------------------------------------------------------------


def load(source: Any, team: Team, path: Path, sharded: bool, low_cpu_mem_mode: bool = True, num_threads: int = 1) -> None:
    """Take over states and options of a checkpoint. Parameters without state in it start anew. Collective.

    Args:
        path: of the index, or of the single file.

    Raises:
        CheckpointError: where it is unreadable or incomplete.
        ConfigError: (a ValueError) where number or sizes of param groups differ.
    """
    error = None
    try:
        groups, extra, files = _open_sharded(path) if sharded else _open_single(path)
        source.load_groups(groups)
    except Exception as caught:
        error = caught
    team.share_all(error)
    try:
        ours = [param_id for group in source.groups() for param_id in group["params"]]
        our_id = dict(zip((param_id for group in groups for param_id in group["params"]), ours))
        source.begin_load()
        contents = read_ahead(files, _read_states, low_cpu_mem_mode, num_threads)
        for param_id, state in (item for content in contents for item in content):
            if param_id not in our_id:
                raise CheckpointError(f"{path}: parameter id {param_id} is in no param group")
            source.load_entry(our_id[param_id], state)
        source.finish_load()
        source.load_extra(extra)
    except Exception as caught:
        error = caught
    team.share_all(error)


def _open_sharded(path: Path) -> tuple[list[dict], dict, list[Any]]:
    index = CheckpointIndexFile.from_file(path)
    index.assert_no_dtensor_checkpoint()
    group_file = index.get_param_group_filename()
    if group_file is None:
        raise CheckpointError(f"{path} names no file of param groups: its metadata has no entry param_groups")
    extra_name = index.metadata.get(_EXTRA)
    extra = {} if extra_name is None else read_torch(path.parent / extra_name)
    files, _ = index.get_checkpoint_filenames()
    for file in files:
        if not Path(file).is_file():
            raise CheckpointError(f"cannot read {file}: {path} names it, and there is no such file")
    return read_torch(group_file), extra, files


def _open_single(path: Path) -> tuple[list[dict], dict, list[Any]]:
    if is_safetensors(path):
        table = SafetensorsTable(path)
        if PARAM_GROUPS not in table:
            raise CheckpointError(f"{path} is no optimizer checkpoint: it has no {PARAM_GROUPS}")
        packed = table.metadata.get(_EXTRA)
        extra = {} if packed is None else decode_value(torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.uint8))
        return decode_value(table[PARAM_GROUPS]), extra, [path]
    content = read_torch(path)
    if not isinstance(content, Mapping) or not {"state", PARAM_GROUPS} <= set(content):
        raise CheckpointError(f"{path} is no optimizer checkpoint: expected a dict with the keys state and {PARAM_GROUPS}")
    return content[PARAM_GROUPS], content.get(_EXTRA, {}), [content["state"]]


def _read_states(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """(id, state) of one file, or of states that are read already."""
    if isinstance(file, Mapping) or not is_safetensors(file):
        states = file if isinstance(file, Mapping) else read_torch(file)
        for param_id, state in states.items():
            yield int(param_id), dict(state)
        return
    table = SafetensorsTable(file)
    non_tensor = set(json.loads(table.metadata.get(NON_TENSOR_KEYS, "[]")))
    for param_id, keys in names_of(table).items():
        yield (
            param_id,
            {name: decode_value(table[key]) if key in non_tensor else table[key] for name, key in keys.items()},
        )
