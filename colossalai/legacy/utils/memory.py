"""Compatibility alias of colossalai.utils.memory."""

from ...utils.memory import colo_device_memory_capacity, colo_set_process_memory_fraction

__all__ = ["colo_device_memory_capacity", "colo_set_process_memory_fraction"]
