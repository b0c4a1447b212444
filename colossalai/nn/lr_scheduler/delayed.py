"""Schedules of two stages: something of one's own first, then another scheduler from its step 0 on."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError

from .closed_form import ClosedFormLR, number, set_lr


class TwoStageScheduler(ClosedFormLR):
    """``first_stage`` for ``first_steps`` steps (none here), then ``after_scheduler``.

    If ``after_scheduler`` is one of this package, both stages are pure functions of the step. Any other torch scheduler
    (but ReduceLROnPlateau, which wants a metric) is stepped along, from the learning rates it set when it was made.

    Args:
        optimizer: the optimizer ``after_scheduler`` was made for.
        after_scheduler: a fresh scheduler.
    """

    def __init__(self, optimizer: Optimizer, after_scheduler: LRScheduler, last_epoch: int = -1) -> None:
        if isinstance(after_scheduler, ReduceLROnPlateau) or not isinstance(after_scheduler, LRScheduler):
            raise ConfigError(
                f"after_scheduler: {type(after_scheduler).__name__} cannot follow a warmup or delay, give an "
                "LRScheduler that steps without a metric"
            )
        self.after_scheduler = after_scheduler
        self.finished = False
        self._foreign_first = [number(lr) for lr in after_scheduler.get_last_lr()]
        super().__init__(optimizer, last_epoch)

    @property
    def first_steps(self) -> int:
        """Length of the first stage."""
        return 0

    def first_stage(self, step: int, base: float) -> float:
        """Learning rate at a step of the first stage."""
        return base

    @property
    def _closed(self) -> bool:
        return isinstance(self.after_scheduler, ClosedFormLR)

    def lrs_at(self, step: int) -> list[float]:
        if step < self.first_steps:
            return [self.first_stage(step, base) for base in self.base_lrs]
        if self._closed:
            self.after_scheduler.base_lrs = self.base_lrs
            return self.after_scheduler.lrs_at(step - self.first_steps)
        if step == self.first_steps:
            return list(self._foreign_first)
        if step != self.last_epoch:
            raise ConfigError(
                f"{type(self.after_scheduler).__name__} does not tell its learning rates ahead: only the present step can be asked"
            )
        return [number(lr) for lr in self.after_scheduler.get_last_lr()]

    def _update_lr(self, epoch: int | None = None) -> None:
        before = self.last_epoch
        self.last_epoch = before + 1 if epoch is None else epoch
        if not self._closed and self.last_epoch > self.first_steps:
            self._step_foreign(max(before, self.first_steps))
        self._set_lrs()

    def _step_foreign(self, before: int) -> None:
        """Step a scheduler that multiplies the learning rate it finds, from the one it left."""
        after = self.after_scheduler
        start = self._foreign_first if before == self.first_steps else [number(lr) for lr in after.get_last_lr()]
        for group, lr in zip(self.optimizer.param_groups, start, strict=True):
            set_lr(group, lr)
        if self.last_epoch == before + 1:
            after.step()
        else:
            after.step(self.last_epoch - self.first_steps)

    def _set_lrs(self) -> None:
        super()._set_lrs()
        self.finished = self.last_epoch >= self.first_steps
        if self._closed:
            after = self.after_scheduler
            after.last_epoch = max(self.last_epoch - self.first_steps, 0)
            after._step_count = after.last_epoch + 1
            after._last_lr = after.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Own fields, and the inner scheduler as ``after_scheduler_type`` (class name), ``after_scheduler_dict``."""
        state = super().state_dict()
        state["after_scheduler_type"] = type(self.after_scheduler).__name__
        state["after_scheduler_dict"] = self.after_scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, inner scheduler included.

        Raises:
            ConfigError: where the inner scheduler is of another class, or the number of param groups is another.
        """
        state = dict(state_dict)
        found, own = state.pop("after_scheduler_type", None), type(self.after_scheduler).__name__
        inner = state.pop("after_scheduler_dict", None)
        state.pop("after_scheduler", None)
        if found not in (None, own):
            raise ConfigError(f"the state has a {found} after the first stage, this {type(self).__name__} a {own}")
        if inner is None:
            get_dist_logger().warning(
                f"the state of {type(self).__name__} has no 'after_scheduler_dict': the inner {own} keeps its own",
                ranks=[0],
            )
        else:
            self.after_scheduler.load_state_dict(inner)
        super().load_state_dict(state)


class DelayerScheduler(TwoStageScheduler):
    """The initial learning rate for ``delay_epochs`` steps, then ``after_scheduler``."""

    def __init__(self, optimizer: Optimizer, delay_epochs: int, after_scheduler: LRScheduler, last_epoch: int = -1) -> None:
        _check("delay_epochs", delay_epochs)
        self.delay_epochs = delay_epochs
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        return self.delay_epochs


class WarmupScheduler(TwoStageScheduler):
    """``(t + 1) / warmup_epochs`` of the initial learning rate at step ``t`` < ``warmup_epochs``, then
    ``after_scheduler``."""

    def __init__(self, optimizer: Optimizer, warmup_epochs: int, after_scheduler: LRScheduler, last_epoch: int = -1) -> None:
        _check("warmup_epochs", warmup_epochs)
        self.warmup_epochs = warmup_epochs
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        return self.warmup_epochs

    def first_stage(self, step: int, base: float) -> float:
        return (step + 1) / self.warmup_epochs * base


class WarmupDelayerScheduler(TwoStageScheduler):
    """A linear warmup of ``warmup_epochs`` steps, the initial learning rate for ``delay_epochs``, then
    ``after_scheduler``."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: int,
        delay_epochs: int,
        after_scheduler: LRScheduler,
        last_epoch: int = -1,
    ) -> None:
        _check("warmup_epochs", warmup_epochs)
        _check("delay_epochs", delay_epochs)
        self.warmup_epochs, self.delay_epochs = warmup_epochs, delay_epochs
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        return self.warmup_epochs + self.delay_epochs

    def first_stage(self, step: int, base: float) -> float:
        return base if step >= self.warmup_epochs else (step + 1) / self.warmup_epochs * base


def _check(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name}={value!r} must not be negative")
