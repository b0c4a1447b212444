import torch
from torch import Tensor

from colossalai.utils.errors import ConfigError

from .base import TensorOptimizer
from .flat import Row, local, update
from .segments import joined, own_norms, squared_norms

# Bounds of the adaptive learning rate, and of each element of the decayed gradient.
_MAX_RATIO, _MAX_ELEMENT = 50.0, 10.0


class Lars(TensorOptimizer):
    """LARS: SGD with momentum whose learning rate is set for each tensor (You et al. 2017, arXiv:1708.03888)::

        ratio = eeta * |p| / (|g| + weight_decay * |p| + epsilon)   within [0, 50]; 1 where |p| or |g| is 0
        buffer = momentum * buffer + clamp(g + weight_decay * p, -10, 10)
        p = p - lr * ratio * buffer

    Args:
        params: parameters, or groups of them; a group with ``lars=False`` takes 1 for every ratio.
        lr: a float.
        eeta: trust coefficient, in (0, 1].

    With ``momentum`` the state of a parameter is ``momentum_buffer``. Tensors may be flat pieces of larger ones if
    ``segment_norms`` is set, see :mod:`colossalai.nn.optimizer.segments`.

    Raises:
        ValueError (ConfigError): for numbers out of range.
    """

    segment_norms = staticmethod(own_norms)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        if not isinstance(lr, float) or lr < 0.0:
            raise ConfigError(f"Invalid learning rate: lr={lr!r} must be a float of at least 0")
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay), ("epsilon", epsilon)):
            if value < 0.0:
                raise ConfigError(f"Invalid {name} value: {name}={value!r} must not be negative")
        if eeta <= 0 or eeta > 1:
            raise ConfigError(f"Invalid eeta value: eeta={eeta!r} must be in (0, 1]")
        super().__init__(
            params,
            dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eeta=eeta, epsilon=epsilon, lars=True),
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given."""
        loss = self._loss_of(closure)
        found = [list(self._with_grad(group)) for group in self.param_groups]
        pairs = [pair for group, members in zip(self.param_groups, found, strict=True) if group["lars"] for pair in members]
        ratios = iter(())
        if any(group["lars"] for group in self.param_groups):
            squares = None
            if pairs:
                squares = torch.stack([squared_norms([local(pair[i]) for pair in pairs]) for i in range(2)])
            weights, grads = self.segment_norms([p for p, _ in pairs], joined([squares], 2, self.param_groups)).sqrt()
            ratios = iter(zip(weights.unbind(), grads.unbind(), strict=True))
        for group, members in zip(self.param_groups, found, strict=True):
            for p, grad in members:
                ratio = _ratio(group, *next(ratios)) if group["lars"] else None
                row = (local(p), local(grad))
                if group["momentum"] != 0:
                    row += tuple(self._state_like(p, "momentum_buffer"))
                _apply(group, row, ratio)
        return loss


def _ratio(group: dict, weight: Tensor, grad: Tensor) -> Tensor:
    decay = group["weight_decay"]
    ratio = group["eeta"] * weight / (grad + decay * weight + group["epsilon"])
    return torch.where((weight > 0) & (grad > 0), ratio, torch.ones_like(ratio)).clamp(0.0, _MAX_RATIO)


def _apply(group: dict, row: Row, ratio: Tensor | None) -> None:
    """One parameter's update, in batches; the ratio differs from tensor to tensor, so they do not share calls."""

    def plain(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor] | None = None) -> None:
        steps = torch._foreach_add(grads, params, alpha=group["weight_decay"]) if group["weight_decay"] else grads
        steps = torch._foreach_clamp_max(torch._foreach_clamp_min(steps, -_MAX_ELEMENT), _MAX_ELEMENT)
        if buffers is not None:
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, steps)
            steps = buffers
        if ratio is not None:
            steps = torch._foreach_mul(steps, ratio.to(device=params[0].device, dtype=params[0].dtype))
        torch._foreach_add_(params, steps, alpha=-group["lr"])

    update([row], None, plain)
