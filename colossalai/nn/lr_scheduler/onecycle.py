from math import cos, pi

from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .closed_form import ClosedFormLR, ignore, number


class OneCycleLR(ClosedFormLR):
    """One cycle up and down (Smith & Topin 2019, arXiv:1708.07120), the same as torch's in two phases.

    The groups' learning rates when this is made are the peaks. The rate starts at ``peak / div_factor``, reaches the
    peak at ``pct_start`` of the steps and ends at ``start / final_div_factor``; with ``cycle_momentum`` the momentum
    (or beta1) of the groups runs the other way, between ``max_momentum`` and ``base_momentum``.

    Raises:
        ValueError (ConfigError): for ``total_steps`` that is no positive integer, ``pct_start`` outside 0 to 1, an
            unknown ``anneal_strategy``, an optimizer without momentum under ``cycle_momentum``, or steps past
            ``total_steps``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
        **kwargs,
    ) -> None:
        ignore("OneCycleLR", kwargs)
        if not isinstance(total_steps, int) or total_steps <= 0:
            raise ConfigError(f"total_steps={total_steps!r} must be a positive integer")
        if not 0.0 <= pct_start <= 1.0:
            raise ConfigError(f"pct_start={pct_start!r} must be between 0 and 1")
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f'anneal_strategy={anneal_strategy!r} must be "cos" or "linear"')
        self.total_steps, self.pct_start, self._anneal_func_type = total_steps, pct_start, anneal_strategy
        self.cycle_momentum = cycle_momentum
        groups = optimizer.param_groups
        if cycle_momentum and "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ConfigError("cycle_momentum=True needs an optimizer with momentum or betas: pass cycle_momentum=False")
        self.use_beta1 = "betas" in optimizer.defaults
        self.base_momentums = _per_group("base_momentum", base_momentum, len(groups))
        self.max_momentums = _per_group("max_momentum", max_momentum, len(groups))
        if last_epoch == -1:
            for group, low, high in zip(groups, self.base_momentums, self.max_momentums, strict=True):
                peak = number(group["lr"])
                group["initial_lr"], group["max_lr"] = peak / div_factor, peak
                group["min_lr"] = group["initial_lr"] / final_div_factor
                if cycle_momentum:
                    group["max_momentum"], group["base_momentum"] = high, low
        self.max_lrs = [number(group.get("max_lr", group["lr"])) for group in groups]
        self.min_lrs = [number(group.get("min_lr", 0.0)) for group in groups]
        super().__init__(optimizer, last_epoch)

    def _anneal(self, start: float, end: float, part: float) -> float:
        if self._anneal_func_type == "linear":
            return (end - start) * part + start
        return end + (start - end) / 2.0 * (cos(pi * part) + 1)

    def _phase(self, step: int) -> tuple[bool, float]:
        """(still going up, how far into this phase)."""
        if step > self.total_steps:
            raise ConfigError(f"step {step} of a schedule of total_steps={self.total_steps}: stop stepping it, or make it longer")
        top, end = float(self.pct_start * self.total_steps) - 1, self.total_steps - 1
        up = step <= top
        start, stop = (0.0, top) if up else (top, end)
        return up, (step - start) / (stop - start) if stop > start else 1.0

    def lrs_at(self, step: int) -> list[float]:
        up, part = self._phase(step)
        return [
            self._anneal(first, peak, part) if up else self._anneal(peak, last, part)
            for first, peak, last in zip(self.base_lrs, self.max_lrs, self.min_lrs, strict=True)
        ]

    def momentums_at(self, step: int) -> list[float]:
        """Momentum, or beta1, of all groups at ``step``."""
        up, part = self._phase(step)
        return [
            self._anneal(high, low, part) if up else self._anneal(low, high, part)
            for low, high in zip(self.base_momentums, self.max_momentums, strict=True)
        ]

    def _set_lrs(self) -> None:
        super()._set_lrs()
        if not self.cycle_momentum:
            return
        for group, momentum in zip(self.optimizer.param_groups, self.momentums_at(self.last_epoch), strict=True):
            if self.use_beta1:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum


def _per_group(name: str, value: float | list[float], count: int) -> list[float]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} values, the optimizer {count} param groups")
    return values
