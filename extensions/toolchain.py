"""What is needed to build native code, and who says what is missing."""

import os
from collections.abc import Mapping

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


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
    raise ValueError(
        f"BUILD_EXT={value!r} is neither on ({', '.join(_ON)}) nor off ({', '.join(filter(None, _OFF))} or unset)"
    )
