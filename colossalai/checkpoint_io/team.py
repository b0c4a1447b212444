"""The ranks that save and load together: who writes, whether all came, and one error for all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from colossalai import comm
from colossalai.comm.groups import timeout_seconds
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import CheckpointError, ColossalError, ConfigError

# How long the others may be late before the call fails; the environment variable COLOSSALAI_TIMEOUT overrules it.
ARRIVAL_SECONDS = 50.0


class Team:
    """The ranks of ``group``, of which the first writes; or this process alone.

    Args:
        group: None is the world.
        alone: every process saves and loads for itself.
    """

    def __init__(self, group=None, alone: bool = False) -> None:
        self.group, self.alone = group, alone

    @property
    def size(self) -> int:
        return 1 if self.alone else comm.world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.alone else comm.rank(self.group)

    @property
    def writes(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def assemble(self, call: str, **arguments: Any) -> None:
        """Return once all ranks made the same call.

        Raises:
            DisagreementError: naming the ranks that did not come, or the arguments that differ.
        """
        if self.alone:
            return
        comm.agree(
            "checkpoint",
            {"call": call, **{name: _text(value) for name, value in arguments.items()}},
            group=self.group,
            timeout=timeout_seconds(ARRIVAL_SECONDS),
            hint=f"{call} is collective: every rank must call it, not only the first",
        )

    def share(self, error: Exception | None) -> None:
        """Raise the first rank's ``error`` on all ranks; the others pass None."""
        if self.size > 1:
            told = comm.broadcast_object(None if error is None else _describe(error), src=0, group=self.group)
            if error is None and told is not None:
                raise _rebuild(told)
        if error is not None:
            raise _as_ours(error) from error

    def first(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        return value if self.size == 1 else comm.broadcast_object(value, src=0, group=self.group)

    def share_all(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one on all ranks."""
        if self.size == 1:
            self.share(error)
            return
        for rank, told in enumerate(comm.all_gather_object(None if error is None else _describe(error), group=self.group)):
            if told is not None:
                raise _rebuild(told, f"rank {rank}: ") from error

    def warn(self, message: str) -> None:
        if self.writes:
            get_dist_logger().warning(message)

    @contextmanager
    def on_writer(self) -> Iterator[bool]:
        """A block whose body only the writing rank should run (it gets True); its error is raised on all ranks."""
        error = None
        try:
            yield self.writes
        except Exception as caught:
            error = caught
        self.share(error)


def _text(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def _as_ours(error: Exception) -> Exception:
    return error if isinstance(error, ColossalError) else CheckpointError(_message(error))


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ColossalError) else f"{type(error).__name__}: {error}"


def _describe(error: Exception) -> tuple[bool, str]:
    return isinstance(error, ConfigError), _message(error)


def _rebuild(told: tuple[bool, str], prefix: str = "") -> Exception:
    is_config, message = told
    return (ConfigError if is_config else CheckpointError)(prefix + message)
