"""Public names that exist and are not built yet, and old ones that are gone: what an import of them answers.

Scripts import more than they use, so a name that is not built yet imports, and raises NotBuiltError when it is
constructed or called. Such names stand in one table, ``pending_table.PENDING``, which shrinks with each capability that
lands. Names that Colossal-AI removed long ago stand in ``moved_table``; importing one raises an ImportError that says
what took its place.

A package that exists serves its own missing names with ``__getattr__ = pending_names(__name__)``. Modules that do not
exist at all are served by a finder at the end of ``sys.meta_path``, so that a real module always wins.
"""

import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from .errors import ConfigError, NotBuiltError
from .moved_table import MOVED_MODULES, MOVED_NAMES
from .pending_table import ARGUMENTS, PENDING

_ROOT = __name__.split(".")[0]


class _NotBuiltAttribute(NotBuiltError, AttributeError):
    """What reading an attribute of a pending class raises. An AttributeError too, so that ``hasattr`` stays legal."""


class PendingType(ABCMeta):
    """The metaclass of pending classes: they can be named, subclassed and tested for, and not constructed.

    It is an ABCMeta so that a script may derive from a pending class and an abstract one together.
    """

    _pending: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotBuiltError(cls._pending)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise _NotBuiltAttribute(f"{cls.__name__}.{name}: {cls._pending}")

    def __instancecheck__(cls, instance: object) -> bool:
        return False  # nothing was ever constructed


def _sentence(name: str, reason: str) -> str:
    return f"{name} is not built yet: {reason}"


def _make(module: str, name: str, reason: str) -> Any:
    """The object that stands for a pending name: a class where the name is spelt like one, else a function."""
    sentence = _sentence(name, reason)
    if name.lstrip("_")[:1].isupper():
        return PendingType(name, (), {"_pending": sentence, "__module__": module, "__doc__": sentence})

    def pending(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotBuiltError(sentence)

    pending.__name__ = pending.__qualname__ = name
    pending.__module__, pending.__doc__ = module, sentence
    return pending


# One object for one name and reason, so that all the paths of a class lead to the same class.
_made: dict[tuple[str, str], Any] = {}


def _get(module: str, name: str) -> Any:
    reason = PENDING[module][name]
    key = (name, reason)
    if key not in _made:
        _made[key] = _make(module, name, reason)
    return _made[key]


def pending_names(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that has names not built yet, or had names that moved.

    Args:
        module: the full name of the package: write ``__getattr__ = pending_names(__name__)`` at the end of it.
    """
    ours = PENDING.get(module, {})
    moved = MOVED_NAMES.get(module, {})

    def __getattr__(name: str) -> Any:
        if name in ours:
            return _get(module, name)
        if name in moved:
            # An ImportError, since `from package import name` would swallow the text of an AttributeError.
            raise ImportError(f"cannot import name {name!r} from {module!r}: {moved[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def _moved(fullname: str) -> str | None:
    """What took the place of a removed module, or of the removed package it was in."""
    parts = fullname.split(".")
    for end in range(len(parts), 1, -1):
        hint = MOVED_MODULES.get(".".join(parts[:end]))
        if hint is not None:
            return hint
    return None


def _has_children(fullname: str) -> bool:
    return any(module.startswith(f"{fullname}.") for module in PENDING)


class PendingFinder(MetaPathFinder, Loader):
    """Serves the modules of the table that do not exist, and explains those that were removed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{_ROOT}."):
            return None
        if fullname in PENDING or _has_children(fullname):
            return ModuleSpec(fullname, self, is_package=_has_children(fullname))
        hint = _moved(fullname)
        if hint is not None:
            # Without ``name``: `from package import module` would swallow an error that has it.
            raise ModuleNotFoundError(f"No module named {fullname!r}: {hint}")
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the ordinary module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = "Not built yet: its names import, and raise when they are used."
        module.__all__ = sorted(public for public in PENDING.get(name, ()) if not public.startswith("_"))
        module.__getattr__ = pending_names(name)


def install() -> None:
    """Put the finder at the end of ``sys.meta_path``, once."""
    if not any(isinstance(finder, PendingFinder) for finder in sys.meta_path):
        sys.meta_path.append(PendingFinder())


def pending_rows() -> Iterator[tuple[str, str, str]]:
    """Every row of the table: module, name, reason."""
    for module, names in PENDING.items():
        for name, reason in names.items():
            yield module, name, reason


def refuse_pending_arguments(where: str, /, **flags: Any) -> None:
    """Raise NotBuiltError for the first argument that asks for what is not built yet.

    Args:
        where: who was given the arguments, for the message: ``"LowLevelZeroPlugin"``.
        flags: the arguments by name. False and None ask for nothing and are accepted.
    """
    for name, value in flags.items():
        if name not in ARGUMENTS:
            raise ConfigError(f"{where}: {name} is not in the table of pending arguments")
        if value is not False and value is not None:
            raise NotBuiltError(f"{where}({name}={value!r}): {_sentence(name, ARGUMENTS[name])}")
