from torch.optim import Optimizer

from .closed_form import ClosedFormLR, ignore


class LinearWarmupLR(ClosedFormLR):
    """A linear warmup, then a straight line to 0::

        lr(t) = (t + 1) / (warmup_steps + 1) * base                     t < warmup_steps
        lr(t) = (total_steps - t) / (total_steps - warmup_steps) * base after it

    From ``total_steps`` on it stays 0; upstream's line goes on below.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **kwargs) -> None:
        ignore("LinearWarmupLR", kwargs)
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1) * base
        if step >= self.total_steps:  # the line would go on below zero, and climb the loss
            return 0.0
        return (self.total_steps - step) / (self.total_steps - self.warmup_steps) * base
