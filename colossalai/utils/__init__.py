"""Small helpers that scripts use, and what the library itself needs everywhere: errors, limits, timers."""

from .common import (
    _cast_float,
    conditional_context,
    disposable,
    ensure_path_exists,
    free_storage,
    get_current_device,
    get_non_persistent_buffers_set,
    is_ddp_ignored,
    set_seed,
)
from .memory import (
    colo_device_memory_capacity,
    colo_device_memory_used,
    colo_get_cpu_memory_capacity,
    colo_set_cpu_memory_capacity,
    colo_set_process_memory_fraction,
)
from .multi_tensor_apply import multi_tensor_applier
from .pending import pending_names
from .tensor_detector import TensorDetector
from .timer import MultiTimer, Timer

__getattr__ = pending_names(__name__)

__all__ = [
    "MultiTimer",
    "TensorDetector",
    "Timer",
    "_cast_float",
    "colo_device_memory_capacity",
    "colo_device_memory_used",
    "colo_get_cpu_memory_capacity",
    "colo_set_cpu_memory_capacity",
    "colo_set_process_memory_fraction",
    "conditional_context",
    "disposable",
    "ensure_path_exists",
    "free_storage",
    "get_current_device",
    "get_non_persistent_buffers_set",
    "is_ddp_ignored",
    "multi_tensor_applier",
    "set_seed",
]
