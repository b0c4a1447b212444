import torch
from torch import Tensor

from colossalai.utils.errors import ConfigError

from .base import TensorOptimizer
from .flat import Row, local
from .layerwise import LambGroup, LambRule, trust_ratios
from .segments import joined, own_norms


class Lamb(TensorOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962) as its third version has it, without bias correction unless asked for.

    The decay is added to the update; the trust ratio ``|p| / |update|`` is not clamped, and 1 where either norm is 0.

    Args:
        params: parameters, or groups of them.
        adam: take 1 for every trust ratio.
        bias_correction: scale the learning rate by ``sqrt(1 - beta2^step) / (1 - beta1^step)``.

    The state of a parameter is ``step`` (int), ``exp_avg`` and ``exp_avg_sq``. Its tensors may be flat pieces of larger
    ones if ``segment_norms`` is set, see :mod:`colossalai.nn.optimizer.segments`.

    Raises:
        ValueError (ConfigError): for lr, eps or betas out of range.
        RuntimeError: in ``step``, for sparse gradients.
    """

    segment_norms = staticmethod(own_norms)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        if not 0.0 <= lr:
            raise ConfigError(f"Invalid learning rate: lr={lr!r} must be at least 0")
        if not 0.0 <= eps:
            raise ConfigError(f"Invalid epsilon value: eps={eps!r} must be at least 0")
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"Invalid beta parameter at index {i}: betas[{i}]={beta!r} must be in [0, 1)")
        self.adam = adam
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction))

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given."""
        loss = self._loss_of(closure)
        params, parts = [], []
        for group in self.param_groups:
            for step, (owners, rows) in self._rows_by_step(group).items():
                params += owners
                parts.append(LambGroup(self._rule(group, step), rows))
        squares = [part.first_pass(clip=None, norms=not self.adam) for part in parts]
        if self.adam:
            for part in parts:
                part.second_pass(None)
            return loss
        ratios = trust_ratios(*self.segment_norms(params, joined(squares, 2, self.param_groups)))
        for part, ratio in zip(parts, ratios.split([part.count for part in parts]), strict=True):
            part.second_pass(ratio)
        return loss

    def _rule(self, group: dict, step: int) -> LambRule:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        if group["bias_correction"]:
            lr = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        return LambRule(lr, beta1, beta2, 1 - beta1, group["eps"], group["weight_decay"])

    def _rows_by_step(self, group: dict) -> dict[int, tuple[list[Tensor], list[Row]]]:
        found: dict[int, tuple[list[Tensor], list[Row]]] = {}
        for p, grad in self._with_grad(group):
            state = self.state[p]
            step = state["step"] = int(state.get("step", 0)) + 1
            owners, rows = found.setdefault(step, ([], []))
            owners.append(p)
            rows.append((local(p), local(grad), *self._state_like(p, "exp_avg", "exp_avg_sq")))
        return found
