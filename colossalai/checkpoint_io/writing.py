"""Writing the files of one checkpoint on the first rank, while all ranks deliver."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossalai.logging import get_dist_logger
from colossalai.tensor import Layout, assemble
from colossalai.utils.errors import CheckpointError, ConfigError
from colossalai.utils.safetensors import SafetensorsFile, TensorSpec

from .reading import SafetensorsTable, is_safetensors, read_torch
from .sharder import MIB
from .staging import SingleFile, Staging
from .team import Team

# Ranks tell each other of a failure after so many bytes at most, rather than at the end only.
_REPORT_BYTES = 1024 * MIB


def whole(local: Tensor | None, layout: Layout, group: Any, team: Team) -> tuple[Tensor | None, bool]:
    """(the whole tensor on the CPU, whether it is a copy) on the writing rank, elsewhere of no use. Collective.

    Args:
        local: this rank's elements, flat or in shape, of equal dtype and device type on all ranks.
    """
    if layout.intervals is None:
        if not team.writes:
            return None, True
        value = local.detach()
        return (value, False) if value.device.type == "cpu" else (value.cpu(), True)
    if team.alone:
        raise ConfigError(f"{layout.name} is cut over several ranks: save it through the Booster whose plugin cut it")
    full = assemble(local, layout, local.dtype, group)
    return (None if full is None else full.cpu()), True


def plain(value: Any) -> Any:
    """``value`` with numpy's numbers as Python's, so that it can be read back without running code."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(plain(entry) for entry in value)
    if type(value) is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    return value


def save_torch(value: Any, path: Path) -> None:
    """``torch.save``, and read back at once to be sure that the file can be loaded without running code.

    Raises:
        CheckpointError: where it cannot.
    """
    torch.save(value, path)
    read_torch(path)


@dataclass
class FilePlan:
    """One file of a checkpoint: its keys are known before its tensors come."""

    name: str
    specs: dict[Any, TensorSpec | None] = field(default_factory=dict)
    """Key -> shape and dtype, None for what is no tensor. Keys (id, name) make nested dicts in a torch file."""
    metadata: dict[str, str] = field(default_factory=dict)
    wrap: Callable[[dict], Any] = dict
    """What is saved, given the dict of all keys; torch files only."""


class TorchFile:
    """A file for ``torch.save``: everything is kept until it is complete."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self.path, self._plan, self._values = path, plan, {}

    def put(self, key: Any, value: Any) -> None:
        self._values[key] = value

    def close(self) -> None:
        content: dict = {}
        copies: dict[int, Tensor] = {}
        for key in self._plan.specs:
            value = self._values[key]
            if isinstance(value, Tensor):
                value = copies.setdefault(id(value), _compact(value))
            if isinstance(key, tuple):
                content.setdefault(key[0], {})[key[1]] = value
            else:
                content[key] = value
        torch.save(self._plan.wrap(content), self.path)
        self._values.clear()

    def abort(self) -> None:
        self._values.clear()


def _compact(tensor: Tensor) -> Tensor:
    """The tensor over a storage of its own size, since torch.save writes all of the storage that a view looks at."""
    tensor, nbytes = tensor.detach(), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.nbytes() == nbytes:
        return tensor
    if nbytes == 0 or torch.empty_strided(tensor.shape, tensor.stride(), device="meta").untyped_storage().nbytes() != nbytes:
        return tensor.clone()  # it has holes
    start = tensor.storage_offset() * tensor.element_size()
    part = storage[start : start + nbytes]  # the same memory
    return torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride())


def release_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can: glibc keeps the holes that large tensors leave."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()


class Writer:
    """Puts tensors into files as they come. After an error all else is ignored, and nothing is published."""

    def __init__(self, target: SingleFile | Staging, plans: list[FilePlan]) -> None:
        self.target, self.error = target, None
        self._plans = {plan.name: plan for plan in plans}
        self._left = {plan.name: len(plan.specs) for plan in plans}
        self._open: dict[str, Any] = {}

    def put(self, file: str, key: Any, value: Any) -> None:
        with self.guarded():
            if file not in self._open:
                self._open[file] = self._create(file)
            self._open[file].put(key, value)
            self._left[file] -= 1
            if self._left[file] == 0:
                self._close(file)

    def finish(self, write_rest: Callable[[Callable[[str], Path]], dict[str, Any]]) -> None:
        """Write what comes last and publish.

        Args:
            write_rest: is given {name: where to write it} and returns the arguments of the target's ``publish``.
        """
        with self.guarded():
            for file, left in self._left.items():
                if left:
                    raise CheckpointError(f"{self.target.path(file)}: {left} of its tensors did not come")
                if not self._plans[file].specs:
                    self._open[file] = self._create(file)
                    self._close(file)
            self.target.publish(**write_rest(self.target.path))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Note the error of the block, and give the checkpoint up; after an error the block's own is of no interest."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            self.abort()
            if not isinstance(error, Exception):
                raise

    def abort(self) -> None:
        for file in self._open.values():
            file.abort()
        self._open.clear()
        self.target.discard()

    def _create(self, file: str) -> TorchFile | SafetensorsFile:
        if self.error is not None:
            raise self.error
        plan, path = self._plans[file], self.target.path(file)
        return SafetensorsFile(path, plan.specs, plan.metadata) if is_safetensors(file) else TorchFile(path, plan)

    def _close(self, file: str) -> None:
        self._open.pop(file).close()
        path, plan = self.target.path(file), self._plans[file]
        if is_safetensors(file):
            table = SafetensorsTable(path)
            found = {name: TensorSpec.of(table[name]) for name in table}
            complete = found == plan.specs
        else:
            complete = isinstance(read_torch(path), Mapping)
        if not complete:
            raise CheckpointError(f"{path} does not hold what was written to it: is the disk full?")


class Background:
    """A thread that writes while training goes on; one save at a time, whose error waits for the next call."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future | None = None

    def submit(self, function: Callable, *arguments: Any) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="colossalai-checkpoint")
        self._last = self._pool.submit(function, *arguments)

    def wait(self) -> Exception | None:
        """Wait until all is on the disk; the error of the last save, once."""
        last, self._last = self._last, None
        return None if last is None else last.exception()


class SaveJob:
    """One save under way on all ranks.

    Args:
        writer: on the writing rank, else None.
        every_mib: how much is written between two exchanges of errors.
        background: write there; tensors are copied first, so that they may change afterwards.
    """

    def __init__(self, team: Team, writer: Writer | None, every_mib: float, background: Background | None = None) -> None:
        self._team, self._writer, self._background = team, writer, background
        self._every, self._bytes = max(1.0, min(every_mib * MIB, _REPORT_BYTES)), 0

    @property
    def writes(self) -> bool:
        """Whether tensors are wanted on this rank: not after an error."""
        return self._writer is not None and self._writer.error is None

    @contextmanager
    def delivering(self, nbytes: int) -> Iterator[None]:
        """A block that puts ``nbytes`` in all; every rank must enter it for the same amounts."""
        if self._writer is None:
            yield
        else:
            with self._writer.guarded():
                yield
        self._bytes += nbytes
        if self._bytes >= self._every:
            self._bytes = 0
            if self._writer is not None:
                release_freed_memory()
            self._share()

    def put(self, file: str, key: Any, value: Any, is_copy: bool) -> None:
        if not self.writes:
            return
        if self._background is None:
            self._writer.put(file, key, value)
            return
        if isinstance(value, Tensor) and not is_copy:
            value = value.detach().to("cpu", copy=True)
        self._background.submit(self._writer.put, file, key, value)

    def finish(self, write_rest: Callable[[Callable[[str], Path]], dict[str, Any]]) -> None:
        """As :meth:`Writer.finish`; in the background this returns at once, else when the files are in place."""
        if self._background is not None:
            if self._writer is not None:
                self._background.submit(_finish_aloud, self._writer, write_rest)
            return
        if self._writer is not None and self._writer.error is None:
            self._writer.finish(write_rest)
        self._share()

    def __enter__(self) -> "SaveJob":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._writer is not None and self._writer.error is None:
            self._writer.error = CheckpointError(f"the save was broken off: {error}")
            self._writer.abort()

    def _share(self) -> None:
        if self._background is None:
            self._team.share(None if self._writer is None else self._writer.error)


def _finish_aloud(writer: Writer, write_rest: Callable) -> None:
    if writer.error is None:
        writer.finish(write_rest)
    if writer.error is not None:
        get_dist_logger().error(f"an asynchronous save failed: {writer.error}")
        raise writer.error
