"""Ranks, and what only some of them do."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from ..context import SingletonMeta
from ..utils.errors import ConfigError
from .local_rank import local_rank

T = TypeVar("T")
Group = dist.ProcessGroup | None


class DistCoordinator(metaclass=SingletonMeta):
    """The ranks of this process and the work that only some ranks do. There is one coordinator per process.

    A ``process_group`` of None is the whole world. Waits last no longer than the time limit of the group.
    Raises ConfigError if the process has not been launched.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("DistCoordinator: this process has not joined a world; call colossalai.launch_from_torch() first")

    # Asked anew each time: a test, or a notebook, may leave one world and join another.
    @property
    def rank(self) -> int:
        """The rank of this process in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine; -1 where nobody said."""
        return local_rank()

    _rank, _world_size, _local_rank = rank, world_size, local_rank  # scripts read these too

    def _known_local_rank(self, who: str) -> int:
        rank = self.local_rank
        if rank < 0:
            raise ConfigError(f"DistCoordinator.{who}: the local rank is unknown; set LOCAL_RANK or launch with local_rank=")
        return rank

    def is_master(self, process_group: Group = None) -> bool:
        """Whether this process is rank 0 of the group."""
        return dist.get_rank(group=process_group) == 0

    def is_node_master(self) -> bool:
        """Whether this process is rank 0 of its machine."""
        return self._known_local_rank("is_node_master") == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """Whether this process is the last of the group."""
        return dist.get_rank(group=process_group) == dist.get_world_size(group=process_group) - 1

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        """Print on rank 0 of the group."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print on rank 0 of every machine."""
        if self._known_local_rank("print_on_node_master") == 0:
            print(msg)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """Let one rank of the group go first; the others enter when it has left, also if it raised.

        Args:
            executor_rank: its rank within the group.
        """
        size = dist.get_world_size(group=process_group)
        if not 0 <= executor_rank < size:
            raise ConfigError(f"executor_rank={executor_rank} is not a rank of the group, which has {size}")
        first = dist.get_rank(group=process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:
            if first:
                self.block_all(process_group)

    def destroy(self, process_group: Group = None) -> None:
        """Leave the group; None leaves the world and all its groups."""
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait until every rank of the group has come here."""
        dist.barrier(group=process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
        """Decorate a function to run on rank 0 of the group only, and give None elsewhere."""

        def decorate(func: Callable[..., T]) -> Callable[..., T | None]:
            @functools.wraps(func)
            def run(*args, **kwargs) -> T | None:
                return func(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate
