"""Saving and loading a model: tensors of a source to files, and back."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import NON_TENSOR_KEYS, TensorSpec, decode_value, encode_value

from . import file_names as names
from .hf import (
    LoadPlan,
    Step,
    ignored_on_save,
    loading_steps,
    save_configuration,
    saving_steps,
    tied_names_to_drop,
)
from .index_file import CheckpointIndexFile
from .reading import Catalog, is_safetensors
from .sharder import MIB, pack
from .sources import ModuleSource, TensorEntry
from .staging import SingleFile, Staging
from .team import Team
from .writing import Background, FilePlan, SaveJob, Writer, plain, whole

_SHOWN = 10


@dataclass
class ModelPlan:
    """What a save will write; equal on all ranks."""

    steps: list[Step]
    entries: dict[str, TensorEntry]
    """By the name that is saved."""
    files: list[FilePlan]
    file_of: dict[str, str]
    sizes: dict[str, float]
    """MiB by key."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further key of a tied tensor -> the key of the tensor."""
    objects: dict[str, Any] = field(default_factory=dict)


def save_sharded(
    source: ModuleSource,
    team: Team,
    directory: Path,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = False,
    background: Background | None = None,
) -> None:
    """Write a Hugging Face directory: shards, index, configuration. Collective.

    Args:
        size_per_shard: MiB; a larger tensor gets a shard of its own.
        background: write there, and return as soon as all tensors are copied.
    """
    base, index_name = names.get_model_base_filenames(prefix, use_safetensors)
    plan = _plan(source, use_safetensors, hf_names=True)
    keys = list(plan.file_of)
    shards = pack((plan.sizes[key] for key in keys), size_per_shard)
    for number, members in enumerate(shards):
        _assign(plan, names.get_shard_filename(base, number), [keys[i] for i in members])
    writer, error = None, None
    if team.writes:
        try:
            writer = Writer(Staging(directory, index_name), plan.files)
        except Exception as caught:
            error = caught
    team.share(error)

    def write_rest(path) -> dict[str, Any]:
        index = CheckpointIndexFile(path(""))
        index.append_meta_data("total_size", sum(plan.sizes.values()))
        for key, file in plan.file_of.items():
            index.append_weight_map(key, file)
        index.write_index_file(index_name)
        save_configuration(source.hf_model, path(""))
        return old_files(directory, base, index_name, team)

    with SaveJob(team, writer, size_per_shard, background) as job:
        _deliver(plan, team, job)
        job.finish(write_rest)


def save_unsharded(
    source: ModuleSource, team: Team, path: Path, use_safetensors: bool = False, background: Background | None = None
) -> None:
    """Write one file: of torch, the state dict under its names; of safetensors, Hugging Face's names. Collective."""
    plan = _plan(source, use_safetensors, hf_names=use_safetensors)
    # The name of the file plan tells the format, whatever the user calls the file.
    _assign(plan, names.SAFE_WEIGHTS_NAME if use_safetensors else names.WEIGHTS_NAME, list(plan.file_of))
    writer, error = None, None
    if team.writes:
        try:
            writer = Writer(SingleFile(path), plan.files)
        except Exception as caught:
            error = caught
    team.share(error)
    with SaveJob(team, writer, float("inf"), background) as job:
        _deliver(plan, team, job)
        job.finish(lambda _: {})


def _plan(source: ModuleSource, use_safetensors: bool, hf_names: bool) -> ModelPlan:
    """Everything but the files."""
    model = source.hf_model
    entries, aliases, specs = {}, {}, {}
    skipped = ignored_on_save(model) if hf_names else set()
    for entry in source.entries():
        own = [name for name in (entry.name, *entry.layout.aliases) if name not in skipped]
        if not own:
            continue
        dropped = tied_names_to_drop(model if hf_names else None, own) if len(own) > 1 else set()
        kept = next(name for name in own if name not in dropped)
        entries[kept], specs[kept] = entry, TensorSpec(tuple(entry.layout.shape), entry.local.dtype)
        if not use_safetensors:  # torch files keep tied tensors under all their names, and once
            aliases.update(dict.fromkeys((name for name in own if name != kept), kept))
    steps = saving_steps(model if hf_names else None, specs)
    plan = ModelPlan(steps, entries, [], {}, {})
    for step in steps:
        for key, spec in step.outputs.items():
            plan.file_of[key], plan.sizes[key] = "", spec.nbytes / MIB
    key_of = {step.inputs[0]: next(iter(step.outputs)) for step in steps if len(step.outputs) == len(step.inputs) == 1}
    for alias, kept in aliases.items():
        renamed = saving_steps(model if hf_names else None, {alias: specs[kept]})[0].outputs
        if kept in key_of and len(renamed) == 1:
            plan.aliases[next(iter(renamed))] = key_of[kept]
    for name, value in source.objects().items():
        plan.objects[name], plan.file_of[name], plan.sizes[name] = plain(value), "", 0.0
    return plan


def _assign(plan: ModelPlan, file: str, keys: list[str]) -> None:
    """Put ``keys``, and the aliases of their tensors, into one file."""
    specs = {key: spec for step in plan.steps for key, spec in step.outputs.items()}
    here = set(keys)
    planned: dict[str, TensorSpec | None] = {key: specs.get(key) for key in keys}
    planned.update({alias: specs[key] for alias, key in plan.aliases.items() if key in here})
    metadata = {}
    if is_safetensors(file):
        encoded = [key for key in keys if key in plan.objects]
        for key in encoded:
            plan.objects[key] = encode_value(plan.objects[key])
            planned[key] = TensorSpec.of(plan.objects[key])
        if encoded:
            metadata[NON_TENSOR_KEYS] = json.dumps(encoded)
    plan.file_of.update(dict.fromkeys(planned, file))
    plan.files.append(FilePlan(file, planned, metadata))


def _deliver(plan: ModelPlan, team: Team, job: SaveJob) -> None:
    """Join tensor after tensor on the writing rank and hand it to the writer."""
    others: dict[str, list[str]] = {}
    for alias, key in plan.aliases.items():
        others.setdefault(key, []).append(alias)
    for step in plan.steps:
        tensors: dict[str, Tensor | None] = {}
        all_copies = True
        for name in step.inputs:
            entry = plan.entries[name]
            tensors[name], is_copy = whole(entry.local, entry.layout, entry.group, team)
            all_copies = all_copies and is_copy
        with job.delivering(sum(spec.nbytes for spec in step.outputs.values())):
            if job.writes:
                for key, tensor in step.convert(tensors).items():
                    for name in (key, *others.get(key, ())):
                        job.put(plan.file_of[name], name, tensor, all_copies)
    with job.delivering(0):
        for name, value in plan.objects.items():
            job.put(plan.file_of[name], name, value, False)


def old_files(directory: Path, base: str, index_name: str, team: Team) -> dict[str, Any]:
    """What is in the directory and does not belong to the new checkpoint: arguments of ``Staging.publish``.

    Numbered shards of the same kind are removed. A checkpoint of another kind, which Hugging Face would prefer or our
    loader could not tell from the new one, keeps its files, but its index or single file is renamed.
    """
    pattern, staged = names.shard_pattern(base), {index_name}
    stale = [path.name for path in directory.iterdir() if pattern.fullmatch(path.name)]
    families = (
        (names.SAFE_WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_NAME, names.WEIGHTS_INDEX_NAME, names.WEIGHTS_NAME),
        (names.SAFE_STATES_INDEX_NAME, names.SAFE_STATE_NAME, names.STATES_INDEX_NAME, names.STATES_NAME),
    )
    rivals = next((family for family in families if index_name in family), ())
    renames = {name: f"{name}.old" for name in rivals if name not in staged and (directory / name).is_file()}
    if renames:
        team.warn(f"{directory} had another checkpoint, which would be read in place of the new one: renamed {renames}")
    return {"stale": stale, "renames": renames}


# -- loading -----------------------------------------------------------------------------------------------------------


def load(
    source: ModuleSource,
    team: Team,
    path: Path,
    sharded: bool,
    strict: bool = True,
    low_cpu_mem_mode: bool = True,
    num_threads: int = 1,
) -> None:
    """Copy a checkpoint into the model. All is checked before the first tensor is changed. Collective.

    Args:
        path: of the index, or of the single file.
        strict: raise for missing and unexpected tensors, else warn. Shapes must fit in any case.
    """
    with ExitStack() as stack:
        error = None
        try:
            index = CheckpointIndexFile.from_file(path) if sharded else None
            if index is not None:
                index.assert_no_dtensor_checkpoint()
            catalog = stack.enter_context(Catalog(index, path, low_cpu_mem_mode, num_threads))
            plan, targets, objects = _plan_load(source, catalog, path, strict, team)
        except Exception as caught:
            error = caught
        team.share_all(error)
        try:
            _copy(source, catalog, plan, targets)
            for name, value in objects.items():
                source.load_object(name, value)
        except Exception as caught:
            error = caught
        team.share_all(error)
    source.finish_load()


def _plan_load(
    source: ModuleSource, catalog: Catalog, path: Path, strict: bool, team: Team
) -> tuple[LoadPlan, dict[str, TensorEntry], dict[str, Any]]:
    targets: dict[str, TensorEntry] = {}
    memory: dict[str, TensorSpec] = {}
    for entry in source.entries():
        for name in (entry.name, *entry.layout.aliases):
            targets[name], memory[name] = entry, TensorSpec(tuple(entry.layout.shape), entry.local.dtype)
    wanted_objects = source.objects()
    objects = {name: _object(catalog[name]) for name in wanted_objects if name in catalog}
    disk = {name: spec for name, spec in catalog.specs().items() if name not in objects}
    plan = loading_steps(source.hf_model, disk, memory)
    loaded = {id(targets[name]) for step in plan.steps for name in step.outputs if name in targets}
    missing = [name for name in plan.missing if id(targets[name]) not in loaded]  # tied ones come under one name
    missing += [name for name in wanted_objects if name not in objects]
    unexpected = plan.unexpected + [name for name in catalog.others() if name not in wanted_objects]
    _check_shapes(plan, memory, path)
    _check_ties(plan, targets, catalog)
    if not plan.steps and disk:
        raise CheckpointError(f"{path}: none of its {len(disk)} tensors is one of the model's: {_few(sorted(disk))}")
    problems = [f"missing: {_few(missing)}"] if missing else []
    problems += [f"unexpected: {_few(unexpected)}"] if unexpected else []
    if problems:
        message = f"{path} does not fit {type(source.module).__name__}: {'; '.join(problems)}"
        if strict:
            raise CheckpointError(f"{message}. Load with strict=False to take what fits")
        team.warn(message)
    return plan, targets, objects


def _object(stored: Any) -> Any:
    """An extra state as its module gave it: safetensors files have it encoded."""
    if isinstance(stored, Tensor) and stored.dtype == torch.uint8 and stored.dim() == 1:
        try:
            return decode_value(stored)
        except CheckpointError:  # a tensor of bytes that another program stored as it is
            pass
    return stored


def _few(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _check_shapes(plan: LoadPlan, memory: dict[str, TensorSpec], path: Path) -> None:
    wrong = [
        f"{name} is {spec.shape}, the model's {memory[name].shape}"
        for step in plan.steps
        for name, spec in step.outputs.items()
        if name in memory and spec.shape != memory[name].shape
    ]
    if wrong:
        raise CheckpointError(f"{path}: shapes differ: {_few(wrong)}")


def _check_ties(plan: LoadPlan, targets: dict[str, TensorEntry], catalog: Catalog) -> None:
    """Take a tied tensor once; raise where the checkpoint has different values under its names."""
    first: dict[int, Step] = {}
    kept = []
    for step in plan.steps:
        entry = targets.get(next(iter(step.outputs))) if len(step.outputs) == 1 else None
        before = None if entry is None else first.setdefault(id(entry), step)
        if before is None or before is step:
            kept.append(step)
        elif len(step.inputs) == len(before.inputs) == 1:
            if not torch.equal(catalog[step.inputs[0]].float(), catalog[before.inputs[0]].float()):
                raise CheckpointError(
                    f"{before.inputs[0]} and {step.inputs[0]} differ in the checkpoint, but are one tensor in the "
                    "model: build it without tied weights"
                )
    plan.steps[:] = kept


def _copy(source: ModuleSource, catalog: Catalog, plan: LoadPlan, targets: dict[str, TensorEntry]) -> None:
    for step in sorted(plan.steps, key=lambda step: catalog.position(step.inputs[0])):
        for name, tensor in step.convert({key: catalog[key] for key in step.inputs}).items():
            if name in targets:
                source.load(targets[name], tensor)
