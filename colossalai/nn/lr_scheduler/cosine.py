from math import cos, pi

from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .closed_form import ClosedFormLR, ignore
from .delayed import DelayerScheduler, WarmupDelayerScheduler, WarmupScheduler


class CosineAnnealingLR(ClosedFormLR):
    """Half a cosine from the initial learning rate to ``eta_min`` (Loshchilov & Hutter 2017, arXiv:1608.03983)::

        lr(t) = eta_min + (base - eta_min) * (1 + cos(pi * t / total_steps)) / 2

    Past ``total_steps`` the cosine goes on, upwards again, as torch's does.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1, **kwargs) -> None:
        ignore("CosineAnnealingLR", kwargs)
        self.T_max, self.eta_min = total_steps, eta_min
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        if self.T_max <= 0:  # a warmup as long as the run leaves nothing to anneal
            return base if step <= 0 else self.eta_min
        return self.eta_min + (base - self.eta_min) * (1 + cos(pi * step / self.T_max)) / 2


class CosineAnnealingWarmupLR(WarmupScheduler):
    """A linear warmup of ``warmup_steps``, then :class:`CosineAnnealingLR` over the rest of ``total_steps``.

    The warmup is ``lr(t) = (t + 1) / warmup_steps * base``; at ``t = warmup_steps`` the rate is ``base`` once more.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        cosine = CosineAnnealingLR(optimizer, total_steps - warmup_steps, eta_min=eta_min, last_epoch=last_epoch)
        super().__init__(optimizer, warmup_steps, cosine, last_epoch=last_epoch)


class FlatAnnealingLR(DelayerScheduler):
    """The initial learning rate for ``int(pct_start * total_steps)`` steps, then a cosine to 0.

    Raises:
        ValueError (ConfigError): where ``pct_start`` is not between 0 and 1.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **kwargs) -> None:
        ignore("FlatAnnealingLR", kwargs)
        _check_pct(pct_start)
        flat = int(total_steps * pct_start)
        cosine = CosineAnnealingLR(optimizer, total_steps - flat, last_epoch=last_epoch)
        super().__init__(optimizer, flat, cosine, last_epoch=last_epoch)


class FlatAnnealingWarmupLR(WarmupDelayerScheduler):
    """A linear warmup, then the initial learning rate for ``pct_start`` of the rest, then a cosine to ``eta_min``.

    Raises:
        ValueError (ConfigError): where ``pct_start`` is not between 0 and 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("FlatAnnealingWarmupLR", kwargs)
        _check_pct(pct_start)
        flat = int((total_steps - warmup_steps) * pct_start)
        cosine = CosineAnnealingLR(optimizer, total_steps - warmup_steps - flat, eta_min=eta_min, last_epoch=last_epoch)
        super().__init__(optimizer, warmup_steps, max(flat, 0), cosine, last_epoch=last_epoch)


def _check_pct(pct_start: float) -> None:
    if not 0.0 <= pct_start <= 1.0:
        raise ConfigError(f"pct_start={pct_start!r} must be between 0 and 1")
