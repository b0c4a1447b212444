"""The report of ``colossalai check -i``: versions, native extensions, and whether they fit together."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossalai.utils.version_file import version_module

YES, NO, NONE = "✓", "x", "N/A"
_WIDTH = 36


@dataclass(frozen=True)
class Versions:
    """What is installed, None for what is not; ``aot_*`` from the ``+torchX.YcuZ`` suffix of a native build."""

    colossalai: str
    torch: str | None
    torch_cuda: str | None
    system_cuda: str | None
    aot_torch: str | None
    aot_cuda: str | None


@dataclass(frozen=True)
class Extension:
    """One native extension: ``state`` is built, compatible or absent; ``why`` says what that means here."""

    name: str
    state: str
    why: str


def installation_report() -> str:
    """The whole report as text."""
    versions, extensions = find_versions(), find_extensions()
    ahead = any(extension.name.endswith("_cuda") and extension.why.startswith("ahead of time") for extension in extensions)
    sections = {
        "Environment": {
            "Colossal-AI version": versions.colossalai,
            "PyTorch version": versions.torch,
            "System CUDA version": versions.system_cuda,
            "CUDA version required by PyTorch": versions.torch_cuda,
            "Devices": _devices(),
        },
        "CUDA Extensions AOT Compilation": {
            "Found AOT CUDA Extension": YES if ahead else NO,
            "PyTorch version used for AOT compilation": versions.aot_torch,
            "CUDA version used for AOT compilation": versions.aot_cuda,
        },
        "Compatibility": {
            "PyTorch version match": same(versions.torch, versions.aot_torch),
            "System and PyTorch CUDA version match": same(versions.system_cuda, versions.torch_cuda),
            "System and Colossal-AI CUDA version match": same(versions.system_cuda, versions.aot_cuda),
        },
    }
    lines = ["#### Installation Report ####"]
    for title, rows in sections.items():
        lines += ["", f"------------ {title} ------------"]
        lines += [f"{label + ':':<{_WIDTH + 8}} {NONE if value is None else value}" for label, value in rows.items()]
    lines += ["", "------------ Native extensions ------------"]
    lines += [f"{extension.name:<{_WIDTH}} {extension.state:<11} {extension.why}" for extension in extensions]
    lines += [
        "",
        f"{YES} yes   {NO} no   {NONE} one of the two is not there. Versions are compared by major and minor number.",
        "Nothing native is needed: without an extension the same work is done in PyTorch.",
    ]
    return "\n".join(lines)


def same(one: str | None, other: str | None) -> str:
    """Whether two versions agree in major and minor number; N/A if one is missing."""
    if one is None or other is None:
        return NONE
    return YES if _major_minor(one) == _major_minor(other) else NO


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


def find_versions() -> Versions:
    """Look at torch, nvcc and the package's own version."""
    torch = torch_cuda = None
    if importlib.util.find_spec("torch") is not None:
        from torch.version import __version__ as torch
        from torch.version import cuda as torch_cuda

    own = version_module().__version__
    suffix = re.search(r"\+torch(\d+\.\d+)cu(\d+\.\d+)", own)
    return Versions(
        colossalai=own,
        torch=None if torch is None else str(torch),
        torch_cuda=torch_cuda,
        system_cuda=system_cuda(),
        aot_torch=suffix and suffix[1],
        aot_cuda=suffix and suffix[2],
    )


def system_cuda(run: Callable[..., Any] = subprocess.run) -> str | None:
    """The release nvcc reports, from CUDA_HOME or else the PATH; None if there is none."""
    home = os.environ.get("CUDA_HOME")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None:
        return None
    try:
        said = run([nvcc, "-V"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", said)
    return release and release[1]


def _devices() -> str:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.name == "cpu":
        return f"none; training runs on the CPU ({os.cpu_count()} cores)"
    names = [accelerator.get_device_name(index) for index in range(accelerator.device_count())]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def find_extensions() -> list[Extension]:
    """Every native extension and its state here. Builds nothing."""
    from colossalai.kernel.extensions import ALL_EXTENSIONS

    return [state_of(kind()) for kind in ALL_EXTENSIONS]


def state_of(extension: Any) -> Extension:
    """``built`` if it can be loaded at once, ``compatible`` if it would be built at first use, else ``absent``."""
    name = extension.name
    try:
        if not extension.is_available():
            extension.assert_compatible()  # says what is missing
            return Extension(name, "absent", "this machine has not the hardware it is written for")
    except Exception as error:
        return Extension(name, "absent", _line(error))
    try:
        found = extension.find_built()
    except Exception as error:  # a library of another torch or CPU
        return Extension(name, "absent", f"built, but cannot be loaded: {_line(error)}")
    if found is not None:
        ahead = getattr(found, "__name__", "").startswith("colossalai._C.")
        return Extension(name, "built", "ahead of time (BUILD_EXT=1)" if ahead else "just in time, at an earlier use")
    try:
        extension.assert_compatible()
        _require_compiler()
    except Exception as error:
        return Extension(name, "absent", _line(error))
    return Extension(name, "compatible", _how_to_build(extension))


def _require_compiler() -> None:
    from colossalai.kernel.extensions import require_compiler

    require_compiler()


def _how_to_build(extension: Any) -> str:
    if extension.support_jit:
        return "not built yet; compiled at its first use, or ahead of time with BUILD_EXT=1"
    return "not built yet; install with BUILD_EXT=1 to compile it"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
