"""Loggers that know the ranks."""

import logging

from .logger import DistributedLogger

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of this name; there is one per name and process."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(include: list[str] | None = None, exclude: list[str] | None = None) -> None:
    """Raise the level of the other loggers of this process to WARNING.

    Args:
        include: only these loggers; None means all that exist now.
        exclude: loggers to leave alone; None means colossalai's own.
    """
    kept = ["colossalai"] if exclude is None else exclude
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if name not in kept:
            logging.getLogger(name).setLevel(logging.WARNING)
