"""Hugging Face: names on disk, tied weights, and the configuration beside the weights.

Transformers keeps some models otherwise in memory than on disk (Mixtral's experts are stacked). Saving writes what
``save_pretrained`` would write, loading takes both forms. The converters are transformers' own; they are first run on
meta tensors, which tells names, shapes and what must be converted together, and then on real ones, group by group, so
that never more than one group is in memory.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from colossalai.logging import get_dist_logger
from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import TensorSpec

Specs = dict[str, TensorSpec]
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass
class Step:
    """Tensors that together give others: ``outputs = convert(inputs)``, mostly one that only changes its name."""

    inputs: tuple[str, ...]
    outputs: Specs
    convert: Convert


def _rename(old: str, new: str, spec: TensorSpec) -> Step:
    return Step((old,), {new: spec}, lambda tensors: {new: tensors[old]})


def _meta(specs: Mapping[str, TensorSpec], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta") for name in names}


def _specs(tensors: Mapping[str, Tensor]) -> Specs:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


# -- saving ------------------------------------------------------------------------------------------------------------


def saving_steps(model: nn.Module | None, specs: Specs) -> list[Step]:
    """How the tensors in memory become those of the file, in the order of ``specs``.

    Args:
        model: the Hugging Face model; None for any other, whose names stay.
    """
    revert = _reverter(model)
    if revert is None:
        return [_rename(name, name, spec) for name, spec in specs.items()]
    metas = _meta(specs, specs)
    final = revert(dict(metas))
    source_of = {id(tensor): name for name, tensor in metas.items()}
    new_name = {source_of[id(tensor)]: name for name, tensor in final.items() if id(tensor) in source_of}
    groups = _groups(revert, metas, [name for name in specs if name not in new_name])
    steps = []
    for name, spec in specs.items():
        if name in new_name:
            steps.append(_rename(name, new_name[name], spec))
        elif name in groups:
            members = groups[name]
            steps.append(Step(members, _specs(revert(_meta(specs, members))), revert))
            for member in members:
                groups.pop(member)
    written = {name: spec for step in steps for name, spec in step.outputs.items()}
    if written != _specs(final):  # converters that look beyond what they convert: all at once, as save_pretrained does
        return [Step(tuple(specs), _specs(final), revert)]
    return steps


def _reverter(model: nn.Module | None) -> Convert | None:
    if model is None:
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 names on disk were those in memory
        return None
    return lambda tensors: revert_weight_conversion(model, dict(tensors))


def _groups(revert: Convert, metas: dict[str, Tensor], names: list[str]) -> dict[str, tuple[str, ...]]:
    """{name: the names it must be converted with}: those whose results, converted alone, have a name in common."""
    groups: list[tuple[list[str], set[str]]] = []
    for name in names:
        try:
            results = set(revert({name: metas[name]}))
        except Exception:  # not convertible alone: with all others that are not
            results = {""}
        touched = [group for group in groups if group[1] & results]
        groups = [group for group in groups if not group[1] & results]
        members = [member for group in touched for member in group[0]] + [name]
        groups.append((members, results.union(*(group[1] for group in touched))))
    return {member: tuple(members) for members, _ in groups for member in members}


def tied_names_to_drop(model: nn.Module | None, names: list[str]) -> set[str]:
    """Which names of one tensor ``save_pretrained`` leaves out: all but one, and rather those declared as tied."""
    declared: list[str] = []
    for prefix, module in [] if model is None else model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None) or ()
        declared += [f"{prefix}.{key}" if prefix else key for key in keys]
    dropped = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in declared)]
    kept = [name for name in names if name not in dropped] or [dropped[-1]]
    return set(names) - {kept[0]}


def ignored_on_save(model: nn.Module | None) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass
class LoadPlan:
    """How the tensors of a checkpoint become those of the model, and what does not fit."""

    steps: list[Step]
    missing: list[str]
    unexpected: list[str]


def loading_steps(model: nn.Module | None, disk: Specs, memory: Specs) -> LoadPlan:
    """Plan for a checkpoint with the tensors ``disk`` and a model with ``memory`` (tied ones under all their names)."""
    if model is None:
        steps, unexpected = (
            [_rename(name, name, disk[name]) for name in disk if name in memory],
            set(disk) - set(memory),
        )
    else:
        steps, unexpected = _hf_loading_steps(model, disk, memory)
    covered = {name for step in steps for name in step.outputs}
    missing = [name for name in memory if name not in covered]
    return LoadPlan(
        steps,
        _not_matching(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)),
        _not_matching(sorted(unexpected), _ignored_unexpected(model)),
    )


def _not_matching(names: list[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _ignored_unexpected(model: nn.Module | None) -> list[str]:
    """Patterns of tensors that older transformers saved and newer ones do not need."""
    if model is None:
        return []
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _hf_loading_steps(model: nn.Module, disk: Specs, memory: Specs) -> tuple[list[Step], set[str]]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return [_rename(name, name, disk[name]) for name in disk if name in memory], set(disk) - set(memory)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    steps, unexpected = {}, set()
    to_convert: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(disk, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, memory)
        if name not in memory and key in memory:
            name, pattern = rename_source_key(key, [], [], prefix, memory)
        if name not in memory:
            unexpected.add(key)
        elif pattern is not None:
            to_convert.setdefault(name, []).append((key, pattern))
        else:
            steps.setdefault(name, _rename(key, name, disk[key]))
    for name, sources in to_convert.items():
        convert = _Converter(model, converter_of[sources[0][1]], name, sources)
        try:
            outputs = _specs(convert(_meta(disk, [key for key, _ in sources])))
        except Exception as error:
            raise CheckpointError(f"the checkpoint's {[key for key, _ in sources][:4]} do not make a {name}: {error}") from error
        steps[name] = Step(tuple(key for key, _ in sources), outputs, convert)
    return list(steps.values()), unexpected


class _Converter:
    """One use of a transformers ``WeightConverter``: tensors on disk to tensors in memory."""

    def __init__(self, model: nn.Module, converter, name: str, sources: list[tuple[str, str]]) -> None:
        self._model, self._converter, self._name, self._sources = model, converter, name, sources

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for key, pattern in self._sources:
            converter.add_tensor(self._name, key, pattern, tensors[key])
        results = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


# -- configuration -----------------------------------------------------------------------------------------------------


def save_configuration(model: nn.Module | None, directory: Path) -> None:
    """Write config.json and generation_config.json, and a custom model's code, as ``save_pretrained`` does."""
    if model is None:
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if not model.can_generate() or getattr(model, "generation_config", None) is None:
        return
    try:
        model.generation_config.save_pretrained(directory)
    except ValueError as error:  # values that transformers itself refuses must not cost the checkpoint
        get_dist_logger().warning(f"generation_config.json was not written: {error}")
