from torch.optim import Optimizer

from .closed_form import ClosedFormLR, ignore
from .delayed import WarmupScheduler


class PolynomialLR(ClosedFormLR):
    """``(base - end_lr) * (1 - min(t, total_steps) / total_steps)^power + end_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("PolynomialLR", kwargs)
        self.steps, self.end_lr, self.power = total_steps, end_lr, power
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        if self.steps <= 0:  # a warmup as long as the run
            return base if step <= 0 else self.end_lr
        return (base - self.end_lr) * (1 - min(step, self.steps) / self.steps) ** self.power + self.end_lr


class PolynomialWarmupLR(WarmupScheduler):
    """A linear warmup of ``warmup_steps``, then :class:`PolynomialLR` over the rest of ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("PolynomialWarmupLR", kwargs)
        polynomial = PolynomialLR(optimizer, total_steps - warmup_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)
        super().__init__(optimizer, warmup_steps, polynomial, last_epoch=last_epoch)
