import torch
from torch import Tensor

from .base import GradNoneMixin, TensorOptimizer, check_betas, check_hyper
from .flat import local
from .layerwise import LambGroup, LambRule, trust_ratios
from .segments import joined, own_norms, squared_norms


class FusedLAMB(GradNoneMixin, TensorOptimizer):
    """LAMB with bias correction in the moments and, before anything else, a clip by the norm of all gradients.

    Args:
        params: parameters, or groups of them.
        bias_correction: divide the moments by ``1 - beta^step``.
        amsgrad: not supported.
        adam_w_mode: add the decay to the update; else ``weight_decay * p`` is added to the gradient.
        grad_averaging: weigh the gradient by ``1 - beta1`` in the first moment, else by 1.
        set_grad_none: whether ``zero_grad`` sets gradients to None instead of zero.
        max_grad_norm: largest norm of all gradients together; 0 for no clipping.
        use_nvlamb: use trust ratios also in groups without weight decay, where they otherwise are 1.

    Steps are counted in ``group["step"]``; the state of a parameter is ``exp_avg`` and ``exp_avg_sq``. Tensors may be
    flat pieces of larger ones if ``segment_norms`` is set, see :mod:`colossalai.nn.optimizer.segments`.

    Raises:
        RuntimeError: for ``amsgrad=True``.
        ConfigError: for numbers out of range.
    """

    segment_norms = staticmethod(own_norms)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support amsgrad=True: leave it out")
        check_hyper("lr", lr)
        check_betas(betas)
        check_hyper("eps", eps)
        check_hyper("weight_decay", weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none, self.use_nvlamb = set_grad_none, use_nvlamb
        super().__init__(
            params,
            dict(
                lr=lr,
                bias_correction=bias_correction,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                grad_averaging=grad_averaging,
                max_grad_norm=max_grad_norm,
            ),
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given."""
        loss = self._loss_of(closure)
        found = [list(self._with_grad(group)) for group in self.param_groups]
        norm = self._gradient_norm(found)
        params, parts, squares, adaptive = [], [], [], []
        for group, pairs in zip(self.param_groups, found, strict=True):
            group["step"] = int(group.get("step", 0)) + 1
            rows = [(local(p), local(g), *self._state_like(p, "exp_avg", "exp_avg_sq")) for p, g in pairs]
            part = LambGroup(self._rule(group), rows)
            adapts = self._adapts(group)
            square = part.first_pass(_clip_factor(norm, group["max_grad_norm"]), norms=adapts)
            parts.append(part)
            adaptive.append(adapts)
            if adapts:
                params += [p for p, _ in pairs]
                squares.append(square)
        ratios = iter(())
        if any(adaptive):
            whole = trust_ratios(*self.segment_norms(params, joined(squares, 2, self.param_groups)))
            ratios = iter(whole.split([part.count for part, adapts in zip(parts, adaptive, strict=True) if adapts]))
        for part, adapts in zip(parts, adaptive, strict=True):
            part.second_pass(next(ratios) if adapts else None)
        return loss

    def _adapts(self, group: dict) -> bool:
        return self.use_nvlamb or group["weight_decay"] != 0

    def _gradient_norm(self, found: list[list[tuple[Tensor, Tensor]]]) -> Tensor | None:
        """Norm of all gradients of all ranks; None where no group clips."""
        if not any(group["max_grad_norm"] > 0 for group in self.param_groups):
            return None
        pairs = [pair for group in found for pair in group]
        square = squared_norms([local(g) for _, g in pairs]).unsqueeze(0) if pairs else None
        return self.segment_norms([p for p, _ in pairs], joined([square], 1, self.param_groups), total=True)[0].sqrt()

    def _rule(self, group: dict) -> LambRule:
        (beta1, beta2), step = group["betas"], group["step"]
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        return LambRule(group["lr"], beta1, beta2, beta3, group["eps"], group["weight_decay"], bool(self.adam_w_mode), c1, c2)


def _clip_factor(norm: Tensor | None, max_norm: float) -> Tensor | None:
    """What gradients of this norm are multiplied by; it stays on the device."""
    if norm is None or max_norm <= 0:
        return None
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
