"""What the optimizers of this package share: closures, sparse gradients, state that fits its parameter."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .flat import is_dense, local, same_order


def check_hyper(name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> None:
    """Raise ConfigError unless the number ``value`` is in ``[low, high)``."""
    if not low <= value < high:
        allowed = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g})"
        raise ConfigError(f"{name}={value!r} must be {allowed}")


def check_betas(betas: tuple[float, ...]) -> None:
    for i, beta in enumerate(betas):
        check_hyper(f"betas[{i}]", beta, 0.0, 1.0)


class TensorOptimizer(Optimizer):
    """Base of the optimizers here. Their steps take gradients of any floating dtype, whatever the parameter's.

    A gradient of another dtype is assigned after ``param.grad_dtype = None`` (torch 2.13); no full copy of it is made.
    """

    takes_any_grad_dtype = True

    def _loss_of(self, closure):
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _with_grad(self, group: dict) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of the parameters in ``group`` that have one."""
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not take sparse gradients (parameter of shape {tuple(p.shape)}): use "
                    "torch.optim.SparseAdam, or Embedding(sparse=False)"
                )
            yield p, p.grad

    def _state_like(self, p: Tensor, *names: str) -> list[Tensor]:
        """The state tensors ``names`` of ``p``, made as zeros of its dtype, device and memory order where missing."""
        state, out = self.state[p], []
        for name in names:
            value = state.get(name)
            if value is None:
                value = state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            here, there = local(value), local(p)
            if here.device != there.device:
                raise ConfigError(
                    f"{type(self).__name__}: {name} of a parameter on {there.device} is on {here.device}; move both together"
                )
            if is_dense(there) and not (is_dense(here) and same_order(here, there)):
                # A checkpoint may have it row-major where the parameter is channels_last: kernels go by memory order.
                value = state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
            out.append(local(value))
        return out


class GradNoneMixin:
    """``zero_grad`` of the fused optimizers: gradients become None unless ``set_grad_none=False`` was given."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=self.set_grad_none or set_to_none)
