"""Extensions written in C++."""

import contextlib
import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .base_extension import _Extension, import_library
from .toolchain import NativeBuildError, require_compiler, require_platform

_COMPILE_SECONDS = 600
_WAIT_SECONDS = 120.0


class _CppExtension(_Extension):
    """A kernel in C++ over torch's stable interface: one build serves all later releases of torch.

    Subclasses name the sources. No flag may tie the result to the CPU it was built on (no ``-march=native``): kernels
    choose among instruction sets when they run.
    """

    def __init__(self, name: str, priority: int = 1) -> None:
        super().__init__(name, support_aot=True, support_jit=True, priority=priority)

    @staticmethod
    def csrc_path() -> Path:
        """The folder of all native sources."""
        return Path(__file__).resolve().parent / "csrc"

    def sources_files(self) -> list[Path]:
        """The C++ files."""
        raise NotImplementedError

    def include_dirs(self) -> list[Path]:
        """Folders of headers beside torch's own."""
        return []

    def cxx_flags(self) -> list[str]:
        """Flags of the compiler. Square roots must not set errno, or they are not vectorised."""
        return ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

    def assert_compatible(self) -> None:
        require_platform()

    def build_aot(self) -> Any:
        from torch.utils.cpp_extension import CppExtension

        root = Path.cwd()  # setuptools wants sources relative to setup.py
        return CppExtension(
            name=f"colossalai._C.{self._name}",
            sources=[os.path.relpath(source, root) for source in self.sources_files()],
            include_dirs=[str(folder) for folder in self.include_dirs()],
            extra_compile_args=self.cxx_flags(),
        )

    def build_jit(self) -> ModuleType:
        library = self.library()
        library.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(library):
            if not library.is_file():
                self._compile(library)
        return import_library(self._name, library)

    def _compile(self, library: Path) -> None:
        """Compile into a file beside the library and move it there, so that nobody ever loads half of one."""
        from torch.utils.cpp_extension import include_paths, library_paths

        require_platform()
        compiler = require_compiler()
        handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".building")
        os.close(handle)
        python = sysconfig.get_paths()
        headers = [*self.include_dirs(), *include_paths(), python["include"], python["platinclude"]]
        command = [compiler, "-shared", "-fPIC", *self.cxx_flags(), f"-DTORCH_EXTENSION_NAME={self._name}"]
        command += [f"-isystem{folder}" for folder in dict.fromkeys(map(str, headers))]
        command += [str(source) for source in self.sources_files()]
        command += [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
        command += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", unfinished]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            if done.returncode != 0:
                raise NativeBuildError(f"{self._name} does not compile:\n{done.stderr[-4000:]}\nby {' '.join(command)}")
            os.replace(unfinished, library)
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"{self._name}: the compiler took longer than {_COMPILE_SECONDS} s") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)


@contextlib.contextmanager
def _one_at_a_time(library: Path) -> Iterator[None]:
    """Let one process of this machine compile while the others wait for its library.

    A lock left by a process that died is waited for no longer than two minutes: compiling twice does no harm.
    """
    lock, mine = library.with_suffix(".lock"), False
    deadline = time.monotonic() + _WAIT_SECONDS
    while not library.is_file() and not mine and time.monotonic() < deadline:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            mine = True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > _WAIT_SECONDS:
                    break
            time.sleep(0.1)
    try:
        yield
    finally:
        if mine:
            lock.unlink(missing_ok=True)
