from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from colossalai.accelerator import get_accelerator
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError

MAX_SKIPPED_AT_FLOOR = 20
"""Steps skipped in a row, with a loss scale that cannot fall further, after which training is stopped with an error."""

_SMALLEST = 2.0**-126


class BaseGradScaler(ABC):
    """The factor that keeps fp16 gradients from vanishing, and the count of the steps it cost.

    Every step calls :meth:`update` once, with what all ranks agreed on, so that the scale is the same on all of them.

    Args:
        initial_scale: the factor to begin with; positive.
        verbose: log each change.
    """

    def __init__(self, initial_scale: float, verbose: bool) -> None:
        if not initial_scale > 0:
            raise ConfigError(f"initial_scale={initial_scale!r} must be positive")
        self._value = float(initial_scale)
        self._verbose = verbose
        self.steps = 0
        """Calls of :meth:`update`, of one per step."""
        self.skipped_steps = 0
        """How many of them overflowed."""
        self.skipped_in_a_row = 0
        """How many of them did since the last that did not."""
        self.skipped_at_floor = 0
        """How many of those in a row found the scale at its floor."""

    @property
    def value(self) -> float:
        """The scale as a number: reading it never waits for the device."""
        return self._value

    @property
    def scale(self) -> Tensor:
        """The scale, (1,), float32, on the current device."""
        return self._on_device(self._value)

    @property
    def inv_scale(self) -> Tensor:
        """One over the scale, (1,), float32, on the current device."""
        return self._on_device(1.0 / self._value)

    @staticmethod
    def _on_device(value: float) -> Tensor:
        # full, not tensor: a fill kernel needs no copy from the host, hence no wait
        return torch.full((1,), value, device=get_accelerator().get_current_device())

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot fall any further."""
        return True

    @property
    def stuck(self) -> bool:
        """Whether so many steps in a row overflowed at the floor that training cannot go on."""
        return self.skipped_at_floor >= MAX_SKIPPED_AT_FLOOR

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """Count a step and adapt the scale: ``overflow`` is whether its gradients were not finite on any rank."""

    def _count(self, overflow: bool) -> None:
        self.steps += 1
        if not overflow:
            self.skipped_in_a_row = self.skipped_at_floor = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.skipped_at_floor = self.skipped_at_floor + 1 if self.at_floor else 0

    _saved: tuple[str, ...] = ("steps", "skipped_steps", "skipped_in_a_row", "skipped_at_floor")

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on the same way, as numbers; ``scale`` among them."""
        return {"scale": self._value, **{name: getattr(self, name) for name in self._saved}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; what an older state lacks keeps its value.

        Raises:
            ConfigError: without ``scale``.
        """
        if "scale" not in state_dict:
            raise ConfigError(f"the state of {type(self).__name__} needs 'scale', it has {sorted(state_dict)}")
        self._value = float(state_dict["scale"])
        for name in self._saved:
            if name in state_dict:
                setattr(self, name, state_dict[name])

    def log(self, message: str) -> None:
        """Tell ``message`` once for all ranks, where ``verbose`` was asked for."""
        if self._verbose:
            get_dist_logger().info(message, ranks=[0])
