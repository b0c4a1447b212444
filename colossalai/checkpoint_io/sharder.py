"""Packing tensors into shards of a limited size."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

MIB = 2**20


def calculate_tensor_size(tensor: Tensor) -> float:
    """Size of a tensor in MiB."""
    return tensor.numel() * tensor.element_size() / MIB


def pack(sizes: Iterable[float], limit: float) -> list[list[int]]:
    """Indices in order, in shards: a new one where adding would exceed ``limit`` and the current is not empty."""
    shards: list[list[int]] = []
    filled = 0.0
    for index, size in enumerate(sizes):
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0.0
        shards[-1].append(index)
        filled += size
    return shards


class StateDictSharder:
    """The same rule as :func:`pack`, for tensors that come one by one.

    Args:
        size_per_shard: MiB.
    """

    def __init__(self, size_per_shard: float) -> None:
        self.max_shard_size = size_per_shard
        self.current_block: dict = {}
        self.current_block_size = 0.0

    def _append(self, key: Any, value: Any, size: float) -> tuple[dict | None, float]:
        full, full_size = None, 0.0
        if self.current_block and self.current_block_size + size > self.max_shard_size:
            full, full_size = self.current_block, self.current_block_size
            self.current_block, self.current_block_size = {}, 0.0
        self.current_block[key] = value
        self.current_block_size += size
        return full, full_size

    def append_param(self, name: str, tensor: Tensor) -> tuple[dict | None, float]:
        """Add a tensor; returns the shard that this completed, if any, and its size in MiB."""
        return self._append(name, tensor, calculate_tensor_size(tensor))

    def append_optim_state(self, param_id: int, state: dict) -> tuple[dict | None, float]:
        """Add a parameter's optimizer state; returns as :meth:`append_param`."""
        size = sum(calculate_tensor_size(value) for value in state.values() if isinstance(value, Tensor))
        return self._append(param_id, state, size)


def _rest(sharder: StateDictSharder) -> Iterator[tuple[dict, float]]:
    if sharder.current_block:
        yield sharder.current_block, sharder.current_block_size


def shard_model_checkpoint(
    state_dict: dict[str, Tensor], max_shard_size: float = 1024, pinned_state_dicts: dict | None = None
) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yields (shard, MiB) of a state dict, or of copies in ``pinned_state_dicts`` by name where that is given."""
    sharder = StateDictSharder(max_shard_size)
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        if pinned_state_dicts is not None:
            if name not in pinned_state_dicts:
                pinned_state_dicts[name] = value.detach().to("cpu", copy=True)
            value = pinned_state_dicts[name].copy_(value.detach())
        full, size = sharder.append_param(name, value)
        if full is not None:
            yield full, size
    yield from _rest(sharder)


def shard_optimizer_checkpoint(
    state_dict: dict, max_shard_size: float = 1024, pinned_state_dicts: dict | None = None
) -> Iterator[tuple[dict[int, dict], float]]:
    """Yields (shard, MiB) of the ``"state"`` of an optimizer's state dict; pinned copies by parameter id and name."""
    sharder = StateDictSharder(max_shard_size)
    for param_id, state in state_dict["state"].items():
        if pinned_state_dicts is not None:
            pinned = pinned_state_dicts.setdefault(param_id, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and name not in pinned:
                    pinned[name] = value.detach().to("cpu", copy=True)
            state = {n: pinned[n].copy_(v.detach()) if isinstance(v, Tensor) else v for n, v in state.items()}
        full, size = sharder.append_optim_state(param_id, state)
        if full is not None:
            yield full, size
    yield from _rest(sharder)
