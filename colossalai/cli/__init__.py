"""The command line: ``colossalai run`` and ``colossalai check``."""

from .cli import cli

__all__ = ["cli"]
