"""What the library asks of a device, answered by a torch device module such as ``torch.cuda``."""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn

Device = torch.device | str | int | None


class BaseAccelerator:
    """One kind of device, over its torch module.

    Subclasses name the module and override what it lacks. Memory is in bytes; ``device=None`` is the current device.

    Attributes:
        support_set_device: whether processes choose among several devices.
    """

    support_set_device: bool = True

    def __init__(self, name: str, communication_backend: str, is_synchronous: bool = False) -> None:
        self._name = name
        self._communication_backend = communication_backend
        self._is_synchronous = is_synchronous

    @property
    def name(self) -> str:
        """The torch device type: ``"cuda"``, ``"npu"`` or ``"cpu"``."""
        return self._name

    @property
    def communication_backend(self) -> str:
        """The torch.distributed backend that moves this device's tensors."""
        return self._communication_backend

    @property
    def is_synchronous(self) -> bool:
        """Whether every call to the device waits for its end."""
        return self._is_synchronous

    @property
    def module(self) -> ModuleType:
        """The torch module of the device."""
        return getattr(torch, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r}, communication_backend={self._communication_backend!r})"

    # Devices.
    def get_version(self) -> str:
        """The version of the device's runtime, as torch was built for it."""
        raise NotImplementedError

    def get_current_device(self) -> torch.device:
        return torch.device(self._name, self.module.current_device())

    def current_device(self) -> int:
        return self.module.current_device()

    def set_device(self, device: Device = None) -> None:
        """Make ``device`` the current one; None keeps it."""
        self.module.set_device(self.current_device() if device is None else device)

    def get_device_name(self, device: Device = None) -> str:
        return self.module.get_device_name(device)

    def synchronize(self, device: Device = None) -> None:
        self.module.synchronize(device)

    def is_available(self) -> bool:
        return self.module.is_available()

    def device_count(self) -> int:
        return self.module.device_count()

    def set_to_device(self, models: nn.Module | list[nn.Module]) -> nn.Module | list[nn.Module]:
        """Move one module, or several, to the current device. A list of one gives back its element."""
        if not isinstance(models, list):
            return models.to(self.get_current_device())
        moved = [model.to(self.get_current_device()) for model in models]
        return moved[0] if len(moved) == 1 else moved

    def get_device_capability(self, device: Device = None) -> tuple[int, int]:
        return self.module.get_device_capability(device)

    def get_device_properties(self, device: Device = None) -> Any:
        return self.module.get_device_properties(self.current_device() if device is None else device)

    def utilization(self, device: Device = None) -> int:
        """Percent of the last sample period in which the device was busy."""
        return self.module.utilization(device)

    # Random numbers.
    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        return self.module.get_rng_state(self._name if device is None else device)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return self.module.get_rng_state_all()

    def set_rng_state(self, new_state: torch.Tensor, device: Device = None) -> None:
        self.module.set_rng_state(new_state, self._name if device is None else device)

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        self.module.set_rng_state_all(new_states)

    def manual_seed(self, seed: int) -> None:
        self.module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.module.manual_seed_all(seed)

    def seed(self) -> None:
        self.module.seed()

    def seed_all(self) -> None:
        self.module.seed_all()

    def initial_seed(self) -> int:
        return self.module.initial_seed()

    # Memory, in bytes.
    def empty_cache(self) -> None:
        self.module.empty_cache()

    def memory_stats(self, device: Device = None) -> dict[str, Any]:
        return self.module.memory_stats(device)

    def memory_summary(self, device: Device = None, abbreviated: bool = False) -> str:
        return self.module.memory_summary(device, abbreviated)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.module.memory_snapshot()

    def memory_allocated(self, device: Device = None) -> int:
        return self.module.memory_allocated(device)

    def max_memory_allocated(self, device: Device = None) -> int:
        return self.module.max_memory_allocated(device)

    def reset_max_memory_allocated(self, device: Device = None) -> None:
        # torch dropped the two separate resets; both peaks restart together.
        self.reset_peak_memory_stats(device)

    def reset_max_memory_cached(self, device: Device = None) -> None:
        self.reset_peak_memory_stats(device)

    def memory_reserved(self, device: Device = None) -> int:
        return self.module.memory_reserved(device)

    def max_memory_reserved(self, device: Device = None) -> int:
        return self.module.max_memory_reserved(device)

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        """Limit this process to a fraction, 0 to 1, of the device's memory."""
        self.module.set_per_process_memory_fraction(fraction, device)

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        self.module.reset_peak_memory_stats(device)

    # Streams.
    def Stream(self, device: Device = None, priority: int = 0, **kwargs: Any) -> Any:
        return self.module.Stream(device, priority, **kwargs)

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return self.module.Event(enable_timing, blocking, interprocess)

    def current_stream(self, device: Device = None) -> Any:
        return self.module.current_stream(device)

    def default_stream(self, device: Device = None) -> Any:
        return self.module.default_stream(device)

    def set_stream(self, stream_: Any) -> None:
        self.module.set_stream(stream_)

    def stream(self, stream_: Any) -> AbstractContextManager:
        """A context in which work goes to ``stream_``."""
        return self.module.stream(stream_)

    # Mixed precision.
    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager:
        return torch.autocast(self._name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
