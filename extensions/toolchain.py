"""What is needed to build native code, and who says what is missing."""

import importlib.util
import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from types import ModuleType

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_COMPILERS = ("c++", "g++", "clang++")


class NativeBuildError(RuntimeError):
    """Native code cannot be built here. The text names what is missing and the way out."""


def build_flag(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether BUILD_EXT asks for the native extensions: 1, true, yes or on; 0, false, no, off or unset says no.

    Raises ValueError for anything else.
    """
    value = environ.get("BUILD_EXT", "")
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    off = ", ".join(word for word in _OFF if word)
    raise ValueError(f"BUILD_EXT={value!r} is neither on ({', '.join(_ON)}) nor off ({off} or unset)")


def require_platform() -> None:
    """Raise NativeBuildError where native code is not built: on Windows."""
    if sys.platform == "win32":
        raise NativeBuildError(
            "native extensions cannot be built on Windows: they are written for GCC and Clang. "
            "unset BUILD_EXT to install the pure Python package, which does the same without them, or build in WSL 2"
        )


def require_torch() -> ModuleType:
    """Import torch, also from the environment around an isolated build; raise NativeBuildError if there is none."""
    if importlib.util.find_spec("torch") is None:
        # pip hides the packages of the environment from the build, but the interpreter still knows where they are.
        for key in ("purelib", "platlib"):
            site.addsitedir(sysconfig.get_paths()[key])
    try:
        import torch
    except ImportError as error:
        raise NativeBuildError(
            f"BUILD_EXT is on and needs torch in the environment ({error}). Install torch first, then run "
            "`BUILD_EXT=1 pip install --no-build-isolation .` (uv hides torch: it needs --no-build-isolation too), "
            "or unset BUILD_EXT to install the pure Python package"
        ) from error
    return torch


def require_compiler() -> str:
    """The C++ compiler; raises NativeBuildError if there is none."""
    asked = os.environ.get("CXX", "").split()
    names = asked[-1:] or _COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NativeBuildError(
        f"no C++ compiler: {', '.join(names)} {'named by CXX ' if asked else ''}cannot be found on PATH. Install one "
        "(for example the package g++), or unset BUILD_EXT to use the pure Python package, which does without"
    )
