"""Extensions written in CUDA."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from .base_extension import _Extension, import_library
from .toolchain import NativeBuildError, require_compiler, require_platform

# Without a device to ask, and for wheels that other machines use.
_ARCHITECTURES = "8.0;9.0;10.0+PTX"


class _CudaExtension(_Extension):
    """A kernel in CUDA. Subclasses name the sources.

    Without a GPU in sight it is compiled for TORCH_CUDA_ARCH_LIST, by default 8.0, 9.0 and 10.0.
    """

    def __init__(self, name: str, priority: int = 1) -> None:
        super().__init__(name, support_aot=True, support_jit=True, priority=priority)

    @staticmethod
    def csrc_path() -> Path:
        """The folder of all native sources."""
        return Path(__file__).resolve().parent / "csrc"

    def sources_files(self) -> list[Path]:
        """The C++ and CUDA files."""
        raise NotImplementedError

    def include_dirs(self) -> list[Path]:
        """Folders of headers beside torch's own."""
        return []

    def cxx_flags(self) -> list[str]:
        """Flags of the C++ compiler."""
        return ["-O3", "-std=c++20"]

    def nvcc_flags(self) -> list[str]:
        """Flags of nvcc; none may contain "arch", which torch adds."""
        return ["-O3", "-std=c++20", "-lineinfo"]

    def is_available(self) -> bool:
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()

    def assert_compatible(self) -> None:
        """Raise NativeBuildError unless torch was built for CUDA, and nvcc of the same major version is here."""
        require_platform()
        import torch
        from torch.utils.cpp_extension import CUDA_HOME

        if torch.version.cuda is None:
            raise NativeBuildError(f"{self._name} needs a torch built for CUDA, and this one ({torch.__version__}) is not")
        if CUDA_HOME is None or shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")) is None:
            raise NativeBuildError(
                f"{self._name} needs nvcc of CUDA {torch.version.cuda}: install that toolkit and set CUDA_HOME to its folder"
            )

    def build_aot(self) -> Any:
        from torch.utils.cpp_extension import CUDAExtension

        self._prepare()
        root = Path.cwd()
        return CUDAExtension(
            name=f"colossalai._C.{self._name}",
            sources=[os.path.relpath(source, root) for source in self.sources_files()],
            include_dirs=[str(folder) for folder in self.include_dirs()],
            extra_compile_args={"cxx": self.cxx_flags(), "nvcc": self.nvcc_flags()},
        )

    def build_jit(self) -> ModuleType:
        from torch.utils.cpp_extension import load

        self._prepare()
        library = self.library()
        library.parent.mkdir(parents=True, exist_ok=True)
        # A folder for each build: torch would wait for ever for a lock that a killed process left in a shared one.
        with tempfile.TemporaryDirectory(dir=library.parent, suffix=".building", ignore_cleanup_errors=True) as folder:
            load(
                name=self._name,
                sources=[str(source) for source in self.sources_files()],
                extra_include_paths=[str(path) for path in self.include_dirs()],
                extra_cflags=self.cxx_flags(),
                extra_cuda_cflags=self.nvcc_flags(),
                build_directory=folder,
            )
            with contextlib.suppress(FileNotFoundError):
                os.replace(Path(folder) / f"{self._name}.so", library)
        return import_library(self._name, library)

    def _prepare(self) -> None:
        self.assert_compatible()
        require_compiler()
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _ARCHITECTURES)
