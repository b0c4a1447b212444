"""``colossalai check``: what is installed, and whether its parts fit together."""

from .check import check

__all__ = ["check"]
