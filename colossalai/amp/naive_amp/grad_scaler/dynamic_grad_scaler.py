from colossalai.utils.errors import ConfigError

from .base_grad_scaler import _SMALLEST, BaseGradScaler


class DynamicGradScaler(BaseGradScaler):
    """A loss scale that falls when gradients overflow and grows while they do not.

    An overflow multiplies the scale by ``backoff_factor``, once ``hysteresis`` of them have come; that count goes back
    to 0 only when the scale grows, so after the first few every overflow lowers it. After ``growth_interval`` steps in
    a row without one the scale is multiplied by ``growth_factor``.

    Args:
        min_scale: floor of the scale; None for the smallest float.
        max_scale: ceiling of the scale; None for none.

    Raises:
        ConfigError: for factors or limits that exclude each other.
    """

    def __init__(
        self,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 2,
        verbose: bool = False,
    ) -> None:
        super().__init__(initial_scale, verbose)
        self.min_scale, self.max_scale = min_scale, max_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_step = self._hysteresis_step = 0
        self._check()

    _saved = (
        *BaseGradScaler._saved,
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "min_scale",
        "max_scale",
        "_growth_step",
        "_hysteresis_step",
    )

    def _check(self) -> None:
        low, high = self.min_scale, self.max_scale
        if low is not None and not 0 < low <= self.value:
            raise ConfigError(f"min_scale={low!r} must be positive and at most initial_scale={self.value:g}")
        if high is not None and high < self.value:
            raise ConfigError(f"max_scale={high!r} must be at least initial_scale={self.value:g}")
        if not self.growth_factor > 1:
            raise ConfigError(f"growth_factor={self.growth_factor!r} must be greater than 1")
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(f"backoff_factor={self.backoff_factor!r} must be between 0 and 1")
        if self.hysteresis < 0:
            raise ConfigError(f"hysteresis={self.hysteresis!r} must not be negative")
        if self.growth_interval < 1:
            raise ConfigError(f"growth_interval={self.growth_interval!r} must be at least 1")

    @property
    def _floor(self) -> float:
        return _SMALLEST if self.min_scale is None else self.min_scale

    @property
    def at_floor(self) -> bool:
        return self.value <= self._floor

    def update(self, overflow: bool) -> None:
        self._count(overflow)
        if overflow:
            self._growth_step = 0
            self._hysteresis_step += 1
            if self._hysteresis_step >= self.hysteresis:
                self._move(max(self.value * self.backoff_factor, self._floor), "gradients overflowed")
            return
        self._growth_step += 1
        if self._growth_step >= self.growth_interval:
            self._growth_step = self._hysteresis_step = 0
            # A scale of inf would turn every gradient into NaN: float32's largest power of two is the last ceiling.
            high = 2.0**127 if self.max_scale is None else self.max_scale
            self._move(min(self.value * self.growth_factor, high), f"no overflow for {self.growth_interval} steps")

    def _move(self, value: float, why: str) -> None:
        if value != self._value:
            self.log(f"{why}: loss scale {self._value:g} -> {value:g}")
            self._value = value
