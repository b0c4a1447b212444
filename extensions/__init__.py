"""Native kernels: their sources (csrc/) and the builders that find, build and load them.

Installed as ``colossalai.kernel.extensions``, sources included, so that an installed package can build just in time.
``setup.py`` loads this package before anything is installed: nothing here imports torch at the top, or colossalai.
"""

from typing import Any

from .base_extension import _Extension
from .cache import cache_key, cpu_features
from .cpp_extension import _CppExtension
from .cpu_adam import CpuAdamArmExtension, CpuAdamX86Extension
from .cuda_extension import _CudaExtension
from .toolchain import NativeBuildError, build_flag, require_compiler, require_platform, require_torch

ALL_EXTENSIONS: list[type[_Extension]] = [CpuAdamX86Extension, CpuAdamArmExtension]

__all__ = [
    "ALL_EXTENSIONS",
    "CpuAdamArmExtension",
    "CpuAdamX86Extension",
    "NativeBuildError",
    "_CppExtension",
    "_CudaExtension",
    "_Extension",
    "build_flag",
    "cache_key",
    "cpu_features",
    "native_modules",
]


def native_modules() -> tuple[list[Any], dict[str, type]]:
    """For ``setup``: the extension modules that fit this machine, and the command that builds them.

    Raises NativeBuildError if the platform, torch or a compiler is missing, or no extension fits.
    """
    require_platform()
    require_compiler()  # before torch, whose import takes seconds
    require_torch()
    from torch.utils.cpp_extension import BuildExtension

    usable = [extension for kind in ALL_EXTENSIONS if (extension := kind()).support_aot and extension.is_available()]
    if not usable:
        names = ", ".join(kind().name for kind in ALL_EXTENSIONS)
        raise NativeBuildError(f"BUILD_EXT is on, and none of {names} fits this machine; unset BUILD_EXT")
    return [extension.build_aot() for extension in usable], {"build_ext": BuildExtension}
