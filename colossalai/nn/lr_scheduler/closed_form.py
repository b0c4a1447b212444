"""Learning rates as pure functions of the step.

torch's schedulers multiply the learning rate they find, so that their sequence depends on what happened to it: a
scheduler inside another, a checkpoint loaded late or a changed group bends the curve. Here the rate at step ``t`` is
computed from ``t`` and the groups' initial rates alone. Hence a resumed run continues exactly, ``get_lr`` may be called
at any time, and no bookkeeping of ``optimizer.step`` calls is needed (torch's warning about their order is wrong where
fp16 skips a step).
"""

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.utils.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))


def number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


def set_lr(group: dict, lr: float) -> None:
    """Set a param group's learning rate, in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def ignore(cls: str, options: dict[str, Any]) -> None:
    """Tell that keywords were given which the schedule ``cls`` has no use for; upstream takes them in silence."""
    if options:
        warnings.warn(f"{cls} has no use for {', '.join(sorted(options))}: leave it out", UserWarning, stacklevel=3)


class ClosedFormLR(LRScheduler):
    """A scheduler whose learning rates are ``lr_at(step, initial learning rate)`` of each param group.

    Args:
        optimizer: a torch optimizer, or the wrapper that ``booster.boost`` returned.
        last_epoch: step to continue after, -1 to begin. To continue, groups must have ``initial_lr``, or load a state
            instead.

    Raises:
        TypeError: where ``optimizer`` is no torch optimizer.
        KeyError: where ``last_epoch`` is given and a group has no ``initial_lr``.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
        for i, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", number(group["lr"]))
            elif "initial_lr" not in group:
                raise KeyError(
                    f"param group {i} has no 'initial_lr', which last_epoch={last_epoch} needs: load the optimizer "
                    "first, or leave last_epoch out and load the scheduler's state"
                )
        self.optimizer = optimizer
        self.base_lrs = [number(group["initial_lr"]) for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self._initial_step()

    def lr_at(self, step: int, base: float) -> float:
        """Learning rate at ``step`` (0 is the first) of a group whose initial one is ``base``."""
        raise NotImplementedError(f"{type(self).__name__} does not define lr_at(step, base)")

    def lrs_at(self, step: int) -> list[float]:
        """Learning rates of all groups at ``step``; nothing is changed."""
        return [self.lr_at(step, base) for base in self.base_lrs]

    def get_lr(self) -> list[float]:
        """Learning rates of all groups at the present step."""
        return self.lrs_at(self.last_epoch)

    _get_closed_form_lr = get_lr

    def _initial_step(self) -> None:
        self._step_count = 0
        self.step()

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step, or to step ``epoch``, and set the groups' learning rates."""
        self._step_count += 1
        self._update_lr(epoch)

    def _update_lr(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._set_lrs()

    def _set_lrs(self) -> None:
        groups, lrs = self.optimizer.param_groups, self.get_lr()
        if len(groups) != len(lrs):
            raise ConfigError(
                f"{type(self).__name__} was made for {len(lrs)} param groups and the optimizer has {len(groups)} now: "
                "make the scheduler after the last add_param_group"
            )
        for group, lr in zip(groups, lrs, strict=True):
            set_lr(group, lr)
        self._last_lr = lrs

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer, as numbers, strings and lists: ``torch.load`` reads it with ``weights_only``."""
        return {key: value for key, value in self.__dict__.items() if key != "optimizer" and _is_plain(value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the groups get the learning rate of that step at once.

        Raises:
            ConfigError: where the state is of another number of param groups.
        """
        state = dict(state_dict)
        saved, groups = len(state.get("base_lrs", self.base_lrs)), len(self.optimizer.param_groups)
        if saved != groups:
            raise ConfigError(
                f"the state of {type(self).__name__} is of {saved} param groups, the optimizer has {groups}: build the "
                "optimizer with the groups it was saved with"
            )
        state.pop("optimizer", None)
        self.__dict__.update(state)
        self.base_lrs = [number(lr) for lr in self.base_lrs]
        self._after_load()
        self._set_lrs()

    def _after_load(self) -> None:
        """Bring what another version saved into this one's form."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)
