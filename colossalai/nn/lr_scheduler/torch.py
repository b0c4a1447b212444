"""The schedules that torch has under the same names, as functions of the step; they make no use of ``total_steps``."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .closed_form import ClosedFormLR

Factor = Callable[[int], float]


class StepLR(ClosedFormLR):
    """``base * gamma^(t // step_size)``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        if step_size <= 0:
            raise ConfigError(f"step_size={step_size!r} must be positive")
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        return base * self.gamma ** (step // self.step_size)


class ExponentialLR(ClosedFormLR):
    """``base * gamma^t``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        return base * self.gamma**step


class _FactorLR(ClosedFormLR):
    """Schedules given by functions of the step, one for all groups or one each.

    Functions are not saved, being code; the attributes of callable objects are, and go into the objects given here.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Factor | list[Factor] | None = None,
        last_epoch: int = -1,
    ) -> None:
        count = len(getattr(optimizer, "param_groups", ()))
        lambdas = list(lr_lambda) if isinstance(lr_lambda, (list, tuple)) else [lr_lambda] * count
        if len(lambdas) != count:
            raise ConfigError(f"lr_lambda has {len(lambdas)} functions, the optimizer {count} param groups")
        if not all(callable(f) for f in lambdas):
            raise TypeError(f"{type(self).__name__} needs lr_lambda, a function of the step or a list with one for each group")
        self.lr_lambdas = lambdas
        super().__init__(optimizer, last_epoch)

    def lrs_at(self, step: int) -> list[float]:
        return [base * self._factor(i, step) for i, base in enumerate(self.base_lrs)]

    def _factor(self, group: int, step: int) -> float:
        """What the initial learning rate of param group ``group`` is multiplied by at ``step``."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["lr_lambdas"] = [dict(f.__dict__) if _has_state(f) else None for f in self.lr_lambdas]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        for function, saved in zip(self.lr_lambdas, state.pop("lr_lambdas", None) or (), strict=False):
            if saved is not None:
                function.__dict__.update(saved)
        super().load_state_dict(state)


class LambdaLR(_FactorLR):
    """``base * lr_lambda(t)``."""

    def _factor(self, group: int, step: int) -> float:
        return self.lr_lambdas[group](step)


class MultiplicativeLR(_FactorLR):
    """``base * lr_lambda(1) * ... * lr_lambda(t)``; after a resume the product is computed anew, once."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Factor | list[Factor] | None = None,
        last_epoch: int = -1,
    ) -> None:
        self._products: dict[int, tuple[int, float]] | None = None
        super().__init__(optimizer, total_steps, lr_lambda, last_epoch)

    def _factor(self, group: int, step: int) -> float:
        known = self._products = self._products or {}
        done, product = known.get(group, (0, 1.0))
        if done > step:
            done, product = 0, 1.0
        for t in range(done + 1, step + 1):
            product *= self.lr_lambdas[group](t)
        known[group] = (step, product)
        return product

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state.pop("_products", None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._products = None  # the functions may have got another state
        super().load_state_dict(state_dict)


def _has_state(function: Any) -> bool:
    """Whether it is a callable object: what plain functions have is code, not state."""
    return hasattr(function, "__dict__") and not hasattr(function, "__code__")
