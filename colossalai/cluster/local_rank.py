"""The rank of this process on its machine."""

import os

_remembered: int | None = None


def remember_local_rank(local_rank: int | None) -> None:
    """Keep what ``launch`` was told, for starts that do not set LOCAL_RANK (Slurm, OpenMPI, ``launch`` itself)."""
    global _remembered
    _remembered = local_rank


def local_rank() -> int:
    """LOCAL_RANK of the environment, else what ``launch`` was told, else -1."""
    text = os.environ.get("LOCAL_RANK", "").strip()
    if text.lstrip("-").isdigit():
        return int(text)
    return -1 if _remembered is None else _remembered
