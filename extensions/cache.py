"""Where kernels built just in time are kept, and what tells one from another."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent / "csrc"


def cpu_features(cpuinfo: str | None = None) -> tuple[str, ...]:
    """The instruction sets of this machine's CPU, sorted.

    Args:
        cpuinfo: the text of ``/proc/cpuinfo``; None reads it. Where there is none, the name of the processor stands in.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.M)
    return tuple(sorted(set(flags.group(1).split()))) if flags else (platform.machine(), platform.processor())


def cache_key(torch_version: str, device: str, features: Iterable[str], sources: bytes) -> str:
    """A folder name that differs whenever a kernel built for one of these must not be loaded for another.

    Args:
        device: the device the kernels are for and the version of its toolkit, as ``cpu`` or ``cuda-13.0``.
        features: of the CPU (``cpu_features``): a home folder may be shared by machines of several kinds.
        sources: whatever else decides, such as the text of the kernels and the Python they are for.
    """
    digest = hashlib.sha256("\0".join((torch_version, device, *features)).encode() + b"\0\0" + sources).hexdigest()
    short = ".".join(torch_version.split("+")[0].split(".")[:2])
    return f"torch{short}_{device}-{digest[:16]}"


def _sources() -> bytes:
    files = sorted(path for path in _SOURCES.rglob("*") if path.is_file())
    return b"\0".join(path.relative_to(_SOURCES).as_posix().encode() + path.read_bytes() for path in files)


def cache_folder() -> Path:
    """Where kernels built just in time go: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/colossalai``, then the key."""
    import torch

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    home = Path(given) if given else Path.home() / ".cache" / "colossalai" / "torch_extensions"
    device = f"cuda-{torch.version.cuda}" if torch.version.cuda else "cpu"
    tag = sys.implementation.cache_tag or sys.version
    return home / cache_key(torch.__version__, device, cpu_features(), tag.encode() + _sources())
