"""The arithmetic of Adam and AdamW, for all optimizers that use it (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

import torch
from torch import Tensor

from .flat import Row, Scale, update


@dataclass(frozen=True)
class AdamRule:
    """One step of Adam::

        g = grad / div_scale   (+ weight_decay * p where not decoupled)
        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g^2
        p = (1 - lr * weight_decay) * p - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    with ``c = 1 - beta^step``, or 1 without bias correction.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool

    def apply(self, rows: list[Row], step: int, div_scale: Scale = -1) -> None:
        """Update rows of ``(param, grad, exp_avg, exp_avg_sq)`` that are all at the ``step``-th step."""
        update(rows, partial(self._fused, step), partial(self._plain, step), div_scale)

    def _fused(self, step: int, params, grads, exp_avgs, exp_avg_sqs: list[Tensor]) -> None:
        # At an infinite step beta^step is 0, so that both corrections are exactly 1.
        time = torch.full((), float(step) if self.bias_correction else inf, device=params[0].device)
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [time] * len(params),
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def _plain(self, step: int, params, grads, exp_avgs, exp_avg_sqs: list[Tensor]) -> None:
        beta1, beta2 = self.betas
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if self.bias_correction else (1.0, 1.0)
        lr = float(self.lr)
        if self.weight_decay != 0:
            if self.decoupled:
                torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            else:
                grads = torch._foreach_add(grads, params, alpha=self.weight_decay)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
        denoms = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denoms, sqrt(c2))
        torch._foreach_add_(denoms, self.eps)
        torch._foreach_addcdiv_(params, exp_avgs, denoms, value=-lr / c1)
