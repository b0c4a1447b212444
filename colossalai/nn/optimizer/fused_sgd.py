from functools import partial

import torch
from torch import Tensor

from colossalai.utils.errors import ConfigError

from .base import TensorOptimizer
from .flat import Row, local, update

_REQUIRED = object()


class FusedSGD(TensorOptimizer):
    """SGD with momentum in one pass over memory, as ``torch.optim.SGD`` defines it.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; required.
        wd_after_momentum: add ``weight_decay * p`` to the update after the momentum, not to the gradient before it.

    With ``momentum`` the state of a parameter is ``momentum_buffer``; without there is none.

    Raises:
        ValueError (ConfigError): for a missing ``lr``, negative numbers, or ``nesterov`` without momentum or with
            dampening.
    """

    def __init__(
        self,
        params,
        lr: float | object = _REQUIRED,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if lr is _REQUIRED:
            raise ConfigError("lr is required: FusedSGD(params, lr=...)")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ConfigError(f"{name}={value!r} must not be negative")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(f"nesterov=True needs momentum > 0 and dampening=0, got {momentum!r} and {dampening!r}")
        self.wd_after_momentum = wd_after_momentum
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov))

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given."""
        loss = self._loss_of(closure)
        for group in self.param_groups:
            momentum, first, later = group["momentum"], [], []
            for p, grad in self._with_grad(group):
                row = (local(p), local(grad))
                if momentum == 0:
                    later.append(row)
                    continue
                known = self.state[p].get("momentum_buffer") is not None
                row += tuple(self._state_like(p, "momentum_buffer"))
                (later if known else first).append(row)
            for rows, is_first in ((first, True), (later, False)):
                if rows:
                    self._apply(group, rows, is_first)
        return loss

    def _apply(self, group: dict, rows: list[Row], first: bool) -> None:
        decay = group["weight_decay"]
        if self.wd_after_momentum and decay != 0:
            # p - lr * (d + decay * p) = (1 - lr * decay) * p - lr * d: the decay need not be in the kernel.
            torch._foreach_mul_([row[0] for row in rows], 1 - float(group["lr"]) * decay)
            decay = 0.0
        update(rows, partial(_fused, group, decay, first), partial(_plain, group, decay, first))


def _fused(group: dict, decay: float, first: bool, params, grads, buffers: tuple[Tensor, ...] = ()) -> None:
    torch._fused_sgd_(
        params,
        grads,
        list(buffers),
        weight_decay=decay,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=first,
    )


def _plain(group: dict, decay: float, first: bool, params, grads, buffers: tuple[Tensor, ...] = ()) -> None:
    momentum = group["momentum"]
    if decay != 0:
        grads = torch._foreach_add(grads, params, alpha=decay)
    if momentum != 0:
        if first:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
        grads = torch._foreach_add(grads, buffers, alpha=momentum) if group["nesterov"] else buffers
    torch._foreach_add_(params, grads, alpha=-float(group["lr"]))
