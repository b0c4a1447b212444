"""A piece of communication under way."""

from collections.abc import Callable, Iterable

import torch.distributed as dist

__all__ = ["Work", "wait_all"]


class Work:
    """Communication that was started; its result is valid after `wait`.

    It keeps the tensors in flight alive. `wait` may run one local function (a sum, a copy back), once; it never
    communicates, so ranks may wait in different orders. Waiting again does nothing; after a failure it raises again.
    On an accelerator `wait` makes the current stream wait, not the host.
    """

    __slots__ = ("_finish", "_handles", "_keep")

    def __init__(
        self,
        handles: Iterable[dist.Work | None] = (),
        finish: Callable[[], None] | None = None,
        keep: Iterable[object] = (),
    ) -> None:
        self._handles = [handle for handle in handles if handle is not None]
        self._finish = finish
        self._keep = tuple(keep)

    def wait(self) -> None:
        """Return when the result is there. RuntimeError when a peer is gone or the group's time limit is over."""
        for handle in self._handles:
            handle.wait()
        self._handles = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = ()

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for a peer."""
        return all(handle.is_completed() for handle in self._handles)


def wait_all(works: Iterable[Work]) -> None:
    """Wait for every one, in order."""
    for work in works:
        work.wait()
