"""Timers that wait for the device before they read the clock."""

import time
from collections.abc import Iterator

from ..accelerator import get_accelerator
from .errors import ConfigError


class Timer:
    """Measures seconds of wall time, with the device's work finished at both ends."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._lap: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def current_time(self) -> float:
        """The clock in seconds, once the device is done."""
        get_accelerator().synchronize()
        return time.perf_counter()

    @property
    def has_history(self) -> bool:
        """Whether ``stop`` has kept a measurement."""
        return bool(self._history)

    def start(self) -> None:
        """Begin to measure."""
        self._started = self._lap = self.current_time

    def lap(self) -> float:
        """Seconds since the last lap, or since ``start``."""
        if self._lap is None:
            raise ConfigError("Timer.lap: the timer is not running; call start() first")
        now = self.current_time
        seconds, self._lap = now - self._lap, now
        return seconds

    def stop(self, keep_in_history: bool = False) -> float:
        """End the measurement and give its seconds."""
        if self._started is None:
            raise ConfigError("Timer.stop: the timer is not running; call start() first")
        self._elapsed = self.current_time - self._started
        self._started = self._lap = None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def reset(self) -> None:
        """Forget everything."""
        self._started = self._lap = None
        self._elapsed = 0.0
        self._history.clear()

    def get_history_mean(self) -> float:
        """The mean of the kept measurements, in seconds."""
        if not self._history:
            raise ConfigError("Timer.get_history_mean: nothing was kept; stop with keep_in_history=True")
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """The sum of the kept measurements, in seconds."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """The last measurement in seconds; 0 before the first."""
        return self._elapsed


class MultiTimer:
    """Timers by name. Switched off, it measures nothing and costs nothing."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Begin to measure under ``name``."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool) -> float | None:
        """End the measurement under ``name`` and give its seconds; None if switched off."""
        return self.get_timer(name).stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """The timer of this name."""
        if name not in self._timers:
            raise ConfigError(f"name={name!r}: no such timer; there are {', '.join(self._timers) or 'none'}")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset the timer of this name, or all of them."""
        if not self._on:
            return
        for timer in self._timers.values() if name is None else [self.get_timer(name)]:
            timer.reset()

    def is_on(self) -> bool:
        """Whether it measures."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Switch measuring on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
