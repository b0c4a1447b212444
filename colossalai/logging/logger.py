"""The logger of the library."""

import logging
import os
import sys
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from ..utils.errors import ConfigError

LEVELS = ("INFO", "DEBUG", "WARNING", "ERROR")
FORMAT = "colossalai - %(name)s - %(levelname)s: %(message)s"


class ScreenHandler(logging.Handler):
    """Writes to stderr: through rich on a terminal, as plain lines elsewhere, since a log file wants no wrapped lines.

    The choice is made at the first record: rich takes longer to import than the rest of this package.
    """

    def __init__(self) -> None:
        super().__init__()
        self._target: logging.Handler | None = None

    def _choose(self) -> logging.Handler:
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.logging import RichHandler
            except ImportError:
                pass
            else:
                return RichHandler(console=Console(stderr=True), show_path=False, show_level=False)
        return _PlainHandler()

    def emit(self, record: logging.LogRecord) -> None:
        if self._target is None:
            self._target = self._choose()
            self._target.setFormatter(self.formatter)
        self._target.handle(record)


class _PlainHandler(logging.StreamHandler):
    """A StreamHandler for whatever ``sys.stderr`` is at the time, as pytest and notebooks replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class DistributedLogger:
    """A logger that can speak for some ranks only.

    Every message makes two records: where it was said, then the message. Get it with ``get_dist_logger``: there is one
    per name, and constructing a second one raises.
    """

    __instances: ClassVar[dict[str, "DistributedLogger"]] = {}

    @staticmethod
    def get_instance(name: str) -> "DistributedLogger":
        """The logger of this name."""
        return DistributedLogger.__instances.get(name) or DistributedLogger(name)

    def __init__(self, name: str) -> None:
        if name in DistributedLogger.__instances:
            raise ConfigError(f"a logger named {name!r} exists already: get it with get_dist_logger({name!r})")
        self._name = name
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._add_handler(ScreenHandler())
        DistributedLogger.__instances[name] = self

    def _add_handler(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(FORMAT))
        self._logger.addHandler(handler)

    @staticmethod
    def _check_level(level: str) -> None:
        if level not in LEVELS:
            raise ConfigError(f"level={level!r} is unknown; the choices are {', '.join(LEVELS)}")

    def set_level(self, level: str) -> None:
        """Say only what is at least as grave as ``level``: INFO, DEBUG, WARNING or ERROR."""
        self._check_level(level)
        self._logger.setLevel(getattr(logging, level))

    def log_to_file(self, path: str | os.PathLike, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write to ``path/rank_<rank>[_<suffix>].log``; the folder is created."""
        self._check_level(level)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank_{_rank()}{f'_{suffix}' if suffix else ''}.log", mode, encoding="utf-8")
        handler.setLevel(getattr(logging, level))
        self._add_handler(handler)

    def _log(self, level: int, message: str, ranks: list[int] | None) -> None:
        if ranks is not None and _rank() not in ranks:
            return
        caller = sys._getframe(2)  # 0 is this function, 1 the level's method
        code = caller.f_code
        self._logger.log(level, "%s", f"{code.co_filename}:{caller.f_lineno} {code.co_name}")
        self._logger.log(level, "%s", message)

    def info(self, message: str, ranks: list[int] | None = None) -> None:
        """Say ``message`` on the given global ranks; None means on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: list[int] | None = None) -> None:
        """Warn of ``message`` on the given global ranks; None means on all."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: list[int] | None = None) -> None:
        """Say ``message`` at level DEBUG on the given global ranks; None means on all."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: list[int] | None = None) -> None:
        """Report ``message`` as an error on the given global ranks; None means on all."""
        self._log(logging.ERROR, message, ranks)
