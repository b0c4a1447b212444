"""Which accelerator this process uses."""

from .base_accelerator import BaseAccelerator
from .cpu_accelerator import CpuAccelerator
from .cuda_accelerator import CudaAccelerator
from .npu_accelerator import NpuAccelerator

# In the order in which they are tried.
_KINDS: dict[str, type[BaseAccelerator]] = {"cuda": CudaAccelerator, "npu": NpuAccelerator, "cpu": CpuAccelerator}
_current: BaseAccelerator | None = None


def set_accelerator(accelerator: str | BaseAccelerator) -> None:
    """Use this accelerator from now on: ``"cuda"``, ``"npu"``, ``"cpu"`` or an object of one's own.

    Raises KeyError for an unknown name and TypeError for any other type.
    """
    global _current
    if isinstance(accelerator, str):
        if accelerator not in _KINDS:
            raise KeyError(f"accelerator={accelerator!r} is unknown; the choices are {', '.join(_KINDS)}")
        _current = _KINDS[accelerator]()
    elif isinstance(accelerator, BaseAccelerator):
        _current = accelerator
    else:
        raise TypeError(f"accelerator must be a name or a BaseAccelerator, not {type(accelerator).__name__}")


def auto_set_accelerator() -> None:
    """Use the first of CUDA, NPU and CPU that this machine has."""
    set_accelerator(next(accelerator for kind in _KINDS.values() if (accelerator := kind()).is_available()))


def get_accelerator() -> BaseAccelerator:
    """The accelerator of this process; the first call chooses it."""
    if _current is None:
        auto_set_accelerator()
    return _current
