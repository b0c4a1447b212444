"""Saving the adapters of a peft model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.interface import ModelWrapper
from colossalai.interface.model import is_peft_model
from colossalai.utils.errors import CheckpointError, ConfigError

from .sources import layout_of
from .staging import Staging
from .team import Team
from .writing import whole

CONFIG_NAME = "adapter_config.json"


def peft_model_of(model: nn.Module) -> nn.Module:
    """The peft model inside ``model``; ConfigError (an AssertionError) where there is none."""
    inner = model.unwrap(unwrap_peft=False) if isinstance(model, ModelWrapper) else model
    if not is_peft_model(inner):
        raise ConfigError(f"save_lora_as_pretrained: {type(inner).__name__} has no adapters, call booster.enable_lora first")
    return inner


def save_adapters(
    model: nn.Module, team: Team, directory: Path, use_safetensors: bool = False, state_dict: dict | None = None
) -> None:
    """Write what ``PeftModel.save_pretrained`` would, from tensors that may be cut over the ranks. Collective.

    Args:
        state_dict: whole tensors under the peft model's own names, in place of the model's.
    """
    peft_model = peft_model_of(model)
    settle = getattr(model, "_force_wait_all_gather", None)
    if settle is not None:
        settle()
    if state_dict is None:
        state_dict = _gather_adapters(peft_model, team)
    with team.on_writer() as writes:
        if not writes:
            return
        if directory.is_file():
            raise CheckpointError(f"{directory} is a file: save_lora_as_pretrained needs a directory")
        staging = Staging(directory, CONFIG_NAME)
        try:
            peft_model.save_pretrained(str(staging.path("")), safe_serialization=use_safetensors, state_dict=state_dict)
            weights = ("adapter_model.safetensors", "adapter_model.bin")
            staging.publish(stale=[weights[1 if use_safetensors else 0]])
        except BaseException:
            staging.discard()
            raise


def _gather_adapters(peft_model: nn.Module, team: Team) -> dict[str, Any]:
    """The tensors that belong to the adapters, whole on the writing rank.

    Which they are is peft's to say: it is asked with tensors that have no data, and what it picks is gathered.
    """
    try:
        from peft import get_peft_model_state_dict
    except ImportError as error:
        raise ImportError('saving adapters needs peft: pip install "colossalai[hf]"') from error
    state = {name: value for name, value in peft_model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    metas = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    picked: set[int] = set()
    for adapter in peft_model.peft_config:
        picked.update(map(id, get_peft_model_state_dict(peft_model, dict(metas), adapter).values()))
    result = {}
    for name, value in state.items():
        if id(metas[name]) in picked:
            layout, local, group = layout_of(value, name)
            tensor, _ = whole(local, layout, group, team)
            if team.writes:
                result[name] = tensor.clone()
    return result
