import torch

from .adam import AdamRule
from .base import GradNoneMixin, TensorOptimizer, check_betas, check_hyper
from .flat import Scale, local


class FusedAdam(GradNoneMixin, TensorOptimizer):
    """Adam or AdamW in one pass over memory; all parameters of a group share one step counter, ``group["step"]``.

    Args:
        params: parameters, or groups of them.
        bias_correction: divide the moments by ``1 - beta^step``.
        adamw_mode: decoupled weight decay (AdamW); else ``weight_decay * p`` is added to the gradient.
        amsgrad: not supported.
        set_grad_none: whether ``zero_grad`` sets gradients to None instead of zero.

    The state of a parameter is ``exp_avg`` and ``exp_avg_sq`` (the parameter's shape, dtype and device).

    Raises:
        RuntimeError: for ``amsgrad=True``.
        ConfigError: for numbers out of range.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support amsgrad=True: use torch.optim.AdamW(amsgrad=True)")
        check_hyper("lr", lr)
        check_betas(betas)
        check_hyper("eps", eps)
        check_hyper("weight_decay", weight_decay)
        self.adamw_mode = 1 if adamw_mode else 0
        self.set_grad_none = set_grad_none
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, div_scale: Scale = -1):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given.

        Args:
            closure: evaluated first, with gradients enabled.
            grads, output_params, scale, grad_norms: legacy; anything but None raises RuntimeError.
            div_scale: as in :meth:`CPUAdam.step`.
        """
        if any(old is not None for old in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step: grads, output_params, scale and grad_norms are no longer supported; set param.grad, "
                "and give the loss scale as div_scale"
            )
        loss = self._loss_of(closure)
        for group in self.param_groups:
            step = group["step"] = self._steps_so_far(group) + 1
            rule = AdamRule(
                group["lr"],
                group["betas"],
                group["eps"],
                group["weight_decay"],
                bool(self.adamw_mode),
                group["bias_correction"],
            )
            rows = [(local(p), local(grad), *self._state_like(p, "exp_avg", "exp_avg_sq")) for p, grad in self._with_grad(group)]
            rule.apply(rows, step, div_scale)
        return loss

    def _steps_so_far(self, group: dict) -> int:
        """``group["step"]``; where it is missing, what a checkpoint of another Adam counted by parameter."""
        if "step" in group:
            return int(group["step"])
        return max((int(self.state[p]["step"]) for p in group["params"] if "step" in self.state.get(p, ())), default=0)
