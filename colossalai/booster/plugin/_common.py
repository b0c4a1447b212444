"""What the data-parallel plugins share."""

from typing import Any

import torch
from torch import nn

from colossalai import comm
from colossalai.accelerator import get_accelerator
from colossalai.interface import ModelWrapper, OptimizerWrapper, TokenWeight
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments


def require_distributed(plugin: str) -> None:
    """Raise unless colossalai was launched: a plugin spreads over ranks that must exist."""
    if not torch.distributed.is_initialized():
        raise ConfigError(f"{plugin} needs process groups: call colossalai.launch_from_torch() first")


def move_to_device(model: nn.Module) -> nn.Module:
    """Put the model on this rank's device; in the fake world everything stays where it is."""
    return model if comm.is_fake() else model.to(get_accelerator().get_current_device())


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Let state that an optimizer made at construction (Adagrad does) follow its parameters to their device."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
                state[key] = value.to(param.device)


def sync_from_first_rank(model: nn.Module, group=None, skip: set | None = None) -> None:
    """Give all ranks the parameters and buffers of the group's first rank."""
    skip = skip or set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in skip:
            comm.broadcast(tensor.data, src=0, group=group)


def weigh_by_tokens(loss_reduction: str, model: nn.Module, optimizer: OptimizerWrapper | None) -> None:
    """Under ``loss_reduction="token"`` let the optimizer weigh losses by the labels of ``model``'s forwards."""
    if loss_reduction == "token" and optimizer is not None:
        inner = model.unwrap() if isinstance(model, ModelWrapper) else model
        optimizer.token_weight = TokenWeight(model, inner)


def lora_model(model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any) -> nn.Module:
    """``model`` with new adapters of ``lora_config``, or with those saved in ``pretrained_dir``."""
    try:
        import peft
    except ImportError as error:
        raise ImportError('enable_lora needs peft: pip install "colossalai[hf]"') from error
    refuse_pending_arguments("enable_lora", bnb_quantization_config=bnb_quantization_config)
    if pretrained_dir is not None:
        return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
    return peft.get_peft_model(model, lora_config)


def add_adapters_to_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put adapter parameters that the optimizer was built without into the group of the weight they adapt."""
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    for name, param in named.items():
        if ".lora_" not in name or param in group_of or not param.requires_grad:
            continue
        base = named.get(f"{name.split('.lora_')[0]}.base_layer.weight")
        if base in group_of:
            group_of[base]["params"].append(param)
        else:
            get_dist_logger().warning(
                f"adapter {name} is trained by no group of the optimizer: the weight it adapts is in none", ranks=[0]
            )
