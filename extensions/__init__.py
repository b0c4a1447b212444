"""Native kernels: their sources (csrc/) and the builders that find, build and load them.

Installed as ``colossalai.kernel.extensions``, sources included, so that an installed package can build just in time.
``setup.py`` loads this package before anything is installed: nothing here imports torch at the top, or colossalai.
"""

from .toolchain import NativeBuildError, build_flag

__all__ = ["NativeBuildError", "build_flag"]
