from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping

from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .closed_form import ClosedFormLR, ignore
from .delayed import WarmupScheduler


class MultiStepLR(ClosedFormLR):
    """``base * gamma^(number of milestones at or before t)``; a milestone given twice counts twice.

    ``total_steps`` has no part in the rule.

    Raises:
        TypeError: where ``milestones`` is None.
        ValueError (ConfigError): where it is empty.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: list[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("MultiStepLR", kwargs)
        _check(milestones)
        self._set(milestones, gamma)
        super().__init__(optimizer, last_epoch)

    def _set(self, milestones: list[int], gamma: float) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma

    def lr_at(self, step: int, base: float) -> float:
        return base * self.gamma ** bisect_right(self.milestones, step)

    def _after_load(self) -> None:
        if isinstance(self.milestones, Mapping):  # torch keeps {milestone: how often}
            self.milestones = sorted(Counter(self.milestones).elements())


class MultiStepWarmupLR(WarmupScheduler):
    """A linear warmup, then :class:`MultiStepLR`; milestones are counted from the start, those in the warmup are
    dropped.

    Raises:
        TypeError: where ``milestones`` is None.
        ValueError (ConfigError): where it is empty.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: list[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("MultiStepWarmupLR", kwargs)
        _check(milestones)
        steps = _Milestones(optimizer, [m - warmup_steps for m in milestones if m >= warmup_steps], gamma, last_epoch)
        super().__init__(optimizer, warmup_steps, steps, last_epoch=last_epoch)


class _Milestones(MultiStepLR):
    """:class:`MultiStepLR` that may be left without milestones."""

    def __init__(self, optimizer: Optimizer, milestones: list[int], gamma: float, last_epoch: int) -> None:
        self._set(milestones, gamma)
        ClosedFormLR.__init__(self, optimizer, last_epoch)


# The name goes into checkpoints as the type of the inner scheduler.
_Milestones.__name__ = "MultiStepLR"


def _check(milestones: list[int] | None) -> None:
    if milestones is None:
        raise TypeError("milestones is None: give the list of steps at which the learning rate falls")
    if len(milestones) == 0:
        raise ConfigError("milestones cannot be empty: give the steps at which the learning rate falls")
