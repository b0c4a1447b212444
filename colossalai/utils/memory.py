"""How much memory there is, in bytes."""

import torch

from ..accelerator import get_accelerator
from ..accelerator.cpu_accelerator import CpuAccelerator, host_memory_bytes
from .errors import ConfigError

_cpu_capacity: int | None = None


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def colo_get_cpu_memory_capacity() -> int:
    """The host's memory in bytes, or what ``colo_set_cpu_memory_capacity`` said."""
    return host_memory_bytes() if _cpu_capacity is None else _cpu_capacity


def colo_set_cpu_memory_capacity(size: int) -> None:
    """Plan as if the host had ``size`` bytes of memory. Nothing is limited by it."""
    global _cpu_capacity
    if size <= 0:
        raise ConfigError(f"size={size}: give a positive number of bytes")
    _cpu_capacity = int(size)


def colo_device_memory_capacity(device: torch.device | str) -> int:
    """The whole memory of a device in bytes."""
    device = torch.device(device)
    if _is_host(device):
        return colo_get_cpu_memory_capacity()
    return get_accelerator().get_device_properties(device).total_memory


def colo_device_memory_used(device: torch.device | str) -> int:
    """The bytes torch has allocated on a device; for the host, the resident memory of this process."""
    device = torch.device(device)
    if _is_host(device):
        return CpuAccelerator().memory_reserved()
    return get_accelerator().memory_allocated(device)


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Limit this process to a fraction, 0 to 1, of the memory of its device."""
    get_accelerator().set_per_process_memory_fraction(ratio)
