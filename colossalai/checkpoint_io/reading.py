"""Files as tables of tensors that are read when they are used.

A file is mapped into memory, so that opening it costs no memory and cutting a piece out of a tensor touches that
piece only.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import TensorSpec

from .index_file import CheckpointIndexFile

PathLike = str | Path
PREFETCH_FILES = 3


def is_safetensors(path: PathLike) -> bool:
    return str(path).endswith(".safetensors")


def read_torch(path: PathLike, map_memory: bool = True) -> Any:
    """What ``torch.save`` wrote, on the CPU; only tensors and plain values are accepted.

    Raises:
        CheckpointError: for a file that is missing, damaged, or would run code.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise CheckpointError(f"cannot read {path}: there is no such file")
    try:
        with open(path, "rb") as file:
            is_zip = file.read(2) == b"PK"
        # Files from before torch 1.6 are no zip archives, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=map_memory and is_zip)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: it is damaged, or no torch file ({type(error).__name__}: {error})") from error


class SafetensorsTable(Mapping):
    """{name: tensor} of a safetensors file, mapped."""

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        try:
            self._file = safe_open(self.path, framework="pt")
            self._names = dict.fromkeys(self._file.keys())
            self.metadata: dict[str, str] = self._file.metadata() or {}
        except Exception as error:
            raise CheckpointError(
                f"cannot read {self.path}: it is missing, damaged, or no safetensors file ({type(error).__name__}: {error})"
            ) from error

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._file.get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"cannot read {name} of {self.path}: {error}") from error


def open_table(path: PathLike) -> Mapping[str, Any]:
    """{name: value} of one file, by its suffix."""
    if is_safetensors(path):
        return SafetensorsTable(path)
    content = read_torch(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"cannot read {path}: it holds a {type(content).__name__}, expected a dict")
    return content


def _own(value: Any, pin: bool) -> Any:
    """A copy in memory of what may be mapped."""
    if not isinstance(value, Tensor):
        return value
    copy = value.clone()
    return copy.pin_memory() if pin else copy


def _read_whole(path: PathLike, pin: bool) -> dict[str, Any]:
    return {name: _own(value, pin) for name, value in open_table(path).items()}


class Catalog:
    """The tensors of a model's checkpoint, whichever files they are in.

    Args:
        index: of a sharded checkpoint; or
        path: the single file, where there is no index.
        low_cpu_mem_mode: map files; else read them ahead into memory (pinned where a CUDA device will want them).
        num_threads: that read ahead.
    """

    def __init__(
        self,
        index: CheckpointIndexFile | None = None,
        path: PathLike | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        self._mapped: dict[str, Mapping[str, Any]] = {}
        self._loaded: dict[str, Future] = {}
        if index is None:
            self._file_of = dict.fromkeys(self._map(os.fspath(path)), os.fspath(path))
        else:
            self._file_of = {name: index.get_checkpoint_file(name) for name in index.weight_map}
        self._pool = None if low_cpu_mem_mode else ThreadPoolExecutor(max(1, num_threads))
        self._queue = list(dict.fromkeys(self._file_of.values()))

    def __enter__(self) -> "Catalog":
        return self

    def __exit__(self, *_: Any) -> None:
        self._mapped.clear()
        self._loaded.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def files(self) -> list[str]:
        return list(self._queue)

    def position(self, name: str) -> int:
        """Which of the files has ``name``."""
        return self._queue.index(self._file_of[name])

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor; other values are left out."""
        return {name: TensorSpec.of(value) for name, value in self._items() if isinstance(value, Tensor)}

    def others(self) -> dict[str, Any]:
        """The values that are no tensors (extra states)."""
        return {name: value for name, value in self._items() if not isinstance(value, Tensor)}

    def _items(self):
        for name, file in self._file_of.items():
            yield name, self._lookup(self._map(file), name, file)

    def _map(self, file: str) -> Mapping[str, Any]:
        if file not in self._mapped:
            self._mapped[file] = open_table(file)
        return self._mapped[file]

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        return self._lookup(self._map(file) if self._pool is None else self._load(file), name, file)

    def _load(self, file: str) -> Mapping[str, Any]:
        start = self._queue.index(file)
        for ahead in self._queue[start : start + PREFETCH_FILES]:
            if ahead not in self._loaded:
                self._loaded[ahead] = self._pool.submit(_read_whole, ahead, torch.cuda.is_available())
        for done in self._queue[: max(0, start - 1)]:  # one behind stays: what is converted together may straddle two files
            self._loaded.pop(done, None)
        return self._loaded[file].result()

    @staticmethod
    def _lookup(table: Mapping[str, Any], name: str, file: str) -> Any:
        if name not in table:
            raise CheckpointError(f"{file} has no {name}, although the index says so")
        return table[name]


def read_ahead(
    sources: Sequence[Any],
    read: Callable[[Any], Iterable[tuple[Any, dict[str, Any]]]],
    low_cpu_mem_mode: bool = True,
    num_threads: int = 1,
) -> Iterator[Iterable[tuple[Any, dict[str, Any]]]]:
    """What ``read`` gives for each source; without ``low_cpu_mem_mode`` the next are read into memory meanwhile."""
    if low_cpu_mem_mode:
        yield from map(read, sources)
        return
    pin = torch.cuda.is_available()

    def read_whole(source: Any) -> list[tuple[Any, dict[str, Any]]]:
        return [(key, {name: _own(value, pin) for name, value in entry.items()}) for key, entry in read(source)]

    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        coming = [pool.submit(read_whole, source) for source in sources[:PREFETCH_FILES]]
        for source in [*sources[PREFETCH_FILES:], *[None] * len(coming)]:
            content = coming.pop(0).result()
            if source is not None:
                coming.append(pool.submit(read_whole, source))
            yield content
