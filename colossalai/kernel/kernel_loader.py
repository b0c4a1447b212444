"""Loaders: one for each kind of kernel, over the extensions that offer it."""

from typing import Any, ClassVar

from ..logging import get_dist_logger
from ..utils.errors import ConfigError
from ..utils.pending import pending_names
from .extensions import CpuAdamArmExtension, CpuAdamX86Extension
from .extensions.base_extension import _Extension

__getattr__ = pending_names(__name__)

__all__ = ["CPUAdamLoader", "KernelLoader"]


class KernelLoader:
    """Chooses among the extensions that offer one kind of kernel.

    Subclasses list them in ``REGISTRY``; ``register_extension`` adds one. Loaded kernels are kept.
    """

    REGISTRY: ClassVar[list[type[_Extension]]] = []
    _loaded: ClassVar[dict[type[_Extension], Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.REGISTRY = list(cls.REGISTRY)  # what one loader registers is not for the others

    @classmethod
    def register_extension(cls, extension: type[_Extension]) -> None:
        """Add an extension to this loader."""
        if extension not in cls.REGISTRY:
            cls.REGISTRY.append(extension)

    @classmethod
    def _choose(cls, ext_name: str | None) -> _Extension:
        extensions = [kind() for kind in cls.REGISTRY]
        names = ", ".join(extension.name for extension in extensions) or "none"
        if ext_name is not None:
            for extension in extensions:
                if extension.name == ext_name:
                    return extension
            raise ConfigError(f"ext_name={ext_name!r}: {cls.__name__} has no such extension; it has {names}")
        usable = [extension for extension in extensions if extension.is_available()]
        if not usable:
            raise ConfigError(f"{cls.__name__}: no extension fits this machine; it has {names}")
        for extension in usable:
            extension.assert_compatible()
        best = max(usable, key=lambda extension: extension.priority)
        if len(usable) > 1:
            others = ", ".join(extension.name for extension in usable)
            get_dist_logger().warning(f"{cls.__name__}: {others} all fit; taking {best.name}, of the highest priority")
        return best

    def load(self, ext_name: str | None = None) -> Any:
        """The kernel, imported if it has been built and built just in time if not.

        Args:
            ext_name: take this extension, without asking whether it fits; None takes the one of highest priority that
                fits this machine.

        Raises ConfigError if there is none, and a RuntimeError that names what is missing if it cannot be built.
        """
        extension = self._choose(ext_name)
        kind = type(extension)
        if kind not in KernelLoader._loaded:
            KernelLoader._loaded[kind] = extension.load()
        return KernelLoader._loaded[kind]

    def load_if_built(self) -> Any | None:
        """The best kernel that has been built already; None if there is none. Builds nothing."""
        usable = [extension for kind in self.REGISTRY if (extension := kind()).is_available()]
        for extension in sorted(usable, key=lambda extension: -extension.priority):
            kind = type(extension)
            if kind not in KernelLoader._loaded:
                module = extension.find_built()
                if module is None:
                    continue
                KernelLoader._loaded[kind] = extension.wrap(module)
            return KernelLoader._loaded[kind]
        return None


class CPUAdamLoader(KernelLoader):
    """Adam on the CPU: a namespace with ``CPUAdamOptimizer``."""

    REGISTRY = [CpuAdamX86Extension, CpuAdamArmExtension]
