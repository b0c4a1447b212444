"""The CPU as an accelerator: it answers what a device answers, with no-ops and zeros where there is nothing to say."""

import os
import platform
import sys
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from .base_accelerator import BaseAccelerator, Device


class HostEvent:
    """An event of a device on which all work is done when the call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event to ``end_event``; both must be recorded."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("elapsed_time: both events must be recorded before their distance is asked")
        return (end_event._recorded - self._recorded) * 1e3


class CpuAccelerator(BaseAccelerator):
    """The host. It has one device, no streams, and no allocator of torch's that counts.

    ``memory_allocated`` and its peak are 0; ``memory_reserved`` is the resident memory of the process and
    ``max_memory_reserved`` its peak, in bytes (0 where the system does not tell).
    """

    support_set_device = False

    def __init__(self) -> None:
        super().__init__(name="cpu", communication_backend="gloo")

    # Devices.
    def get_version(self) -> str:
        return ""

    def get_current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Device = None) -> None:
        pass

    def get_device_name(self, device: Device = None) -> str:
        return platform.processor() or platform.machine()

    def synchronize(self, device: Device = None) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device: Device = None) -> tuple[int, int]:
        return (0, 0)

    def get_device_properties(self, device: Device = None) -> SimpleNamespace:
        """``name``, ``total_memory`` in bytes, ``multi_processor_count`` and the capability 0.0."""
        return SimpleNamespace(
            name=self.get_device_name(),
            total_memory=host_memory_bytes(),
            multi_processor_count=os.cpu_count() or 1,
            major=0,
            minor=0,
        )

    def utilization(self, device: Device = None) -> int:
        return 0

    # Random numbers: the default generator of torch.
    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state(self, new_state: torch.Tensor, device: Device = None) -> None:
        torch.set_rng_state(new_state)

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        if len(new_states) != 1:
            raise ValueError(f"new_states has {len(new_states)} states; the CPU has one generator")
        torch.set_rng_state(new_states[0])

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def seed(self) -> None:
        torch.seed()

    def seed_all(self) -> None:
        torch.seed()

    def initial_seed(self) -> int:
        return torch.initial_seed()

    # Memory.
    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Device = None) -> dict[str, Any]:
        return {}

    def memory_summary(self, device: Device = None, abbreviated: bool = False) -> str:
        return f"cpu: {self.memory_reserved() / 2**30:.3f} GiB resident, peak {self.max_memory_reserved() / 2**30:.3f} GiB"

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return []

    def memory_allocated(self, device: Device = None) -> int:
        return 0

    def max_memory_allocated(self, device: Device = None) -> int:
        return 0

    def memory_reserved(self, device: Device = None) -> int:
        try:
            with open("/proc/self/statm", encoding="ascii") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def max_memory_reserved(self, device: Device = None) -> int:
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        """Limit the address space of this process to a fraction, 0 to 1, of the machine's memory."""
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction={fraction}: give a number above 0 and at most 1")
        try:
            import resource
        except ImportError as missing:
            raise RuntimeError("set_per_process_memory_fraction: this system cannot limit a process's memory") from missing
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (int(host_memory_bytes() * fraction), hard))

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        pass

    # Streams: work on the host is in order.
    def Stream(self, device: Device = None, priority: int = 0, **kwargs: Any) -> Any:
        return torch.cpu.Stream()

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> HostEvent:
        return HostEvent(enable_timing)

    def current_stream(self, device: Device = None) -> Any:
        return torch.cpu.current_stream()

    def default_stream(self, device: Device = None) -> Any:
        return torch.cpu.current_stream()

    def set_stream(self, stream_: Any) -> None:
        pass

    def stream(self, stream_: Any) -> AbstractContextManager:
        return torch.cpu.stream(stream_)


def host_memory_bytes() -> int:
    """The memory of this machine, or of its container, in bytes; 0 where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _windows_memory_bytes()
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(limit, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def _windows_memory_bytes() -> int:
    if not hasattr(os, "add_dll_directory"):
        return 0
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong)
            for name in ("total", "free", "page_total", "page_free", "virtual_total", "virtual_free", "extended")
        ]

    status = Status(length=ctypes.sizeof(Status))
    return status.total if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
