"""What every native extension can say and do."""

import importlib
import importlib.util
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

from .cache import cache_folder


class _Extension(ABC):
    """A native kernel: whether it fits this machine, how it is built and how it is loaded.

    Args:
        name: of the compiled module.
        support_aot: can be built ahead of time, with BUILD_EXT=1.
        support_jit: can be built just in time, at its first use.
        priority: the higher one is taken where several fit.
    """

    def __init__(self, name: str, support_aot: bool, support_jit: bool, priority: int = 1) -> None:
        self._name = name
        self._support_aot = support_aot
        self._support_jit = support_jit
        self.priority = priority

    @property
    def name(self) -> str:
        """The name of the compiled module."""
        return self._name

    @property
    def support_aot(self) -> bool:
        """Whether BUILD_EXT=1 builds it."""
        return self._support_aot

    @property
    def support_jit(self) -> bool:
        """Whether it can be built at its first use."""
        return self._support_jit

    @staticmethod
    def get_jit_extension_folder_path() -> str:
        """Where kernels built just in time are kept, by torch, device, CPU and sources."""
        return str(cache_folder())

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has the hardware."""

    @abstractmethod
    def assert_compatible(self) -> None:
        """Raise RuntimeError with the reason if it cannot run here."""

    @abstractmethod
    def build_aot(self) -> Any:
        """The setuptools extension that builds it ahead of time."""

    @abstractmethod
    def build_jit(self) -> ModuleType:
        """Build it just in time, or take what was built before, and import it."""

    def find_built(self) -> ModuleType | None:
        """The compiled module if it has been built, ahead or just in time; None if not. Builds nothing."""
        name = f"colossalai._C.{self._name}"
        if self._support_aot and importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
        library = self.library()
        return import_library(self._name, library) if self._support_jit and library.is_file() else None

    def library(self) -> Path:
        """The file a build just in time makes."""
        return cache_folder() / f"{self._name}.so"

    def load(self) -> Any:
        """The kernel, imported where it is built, else built just in time."""
        built = self.find_built()
        return self.wrap(self.build_jit() if built is None else built)

    def wrap(self, module: ModuleType) -> Any:
        """What ``load`` gives for the compiled module."""
        return module


def import_library(name: str, library: Path) -> ModuleType:
    """Import a compiled module from its file."""
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
