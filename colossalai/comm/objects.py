"""Python objects between ranks: pickled, as bytes in host memory, under the group's time limit.

In a fake world every rank has what this one has, so each call answers with this rank's own object.
Objects are unpickled: use these only among the processes of one job.
"""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from colossalai.comm import transport
from colossalai.comm.collectives import check_rank
from colossalai.comm.groups import backend_name, is_fake, rank, world_size
from colossalai.comm.ledger import note
from colossalai.comm.p2p import start_batch

__all__ = ["all_gather_object", "broadcast_object", "gather_object"]


def all_gather_object(obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, in rank order, on every rank."""
    size = world_size(group)
    if size == 1:
        return [obj]
    data = _pack(obj, group)
    sizes = _sizes(data, group, size)
    note("all_gather_object", group, sum(sizes), 1)
    if is_fake(group):
        return [obj] * size
    bounds = _bounds(sizes)
    whole = data.new_empty(bounds[-1])
    me = rank(group)
    whole[bounds[me] : bounds[me + 1]] = data
    transport.fill_slices(whole, bounds, group).wait()
    return [_unpack(part) for part in whole.split(sizes)]


def gather_object(obj: Any, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """The objects of all ranks, in rank order, on rank ``dst`` of the group; None elsewhere."""
    size, me = world_size(group), rank(group)
    check_rank("dst", dst, size)
    if size == 1:
        return [obj]
    data = _pack(obj, group)
    sizes = _sizes(data, group, size)
    note("gather_object", group, sum(sizes), 1, float(0 if me == dst else data.numel()))
    if is_fake(group):
        return [obj] * size if me == dst else None
    if me != dst:
        start_batch([(data, dst)], [], group).wait()
        return None
    parts = [data if src == me else data.new_empty(length) for src, length in enumerate(sizes)]
    start_batch([], [(part, src) for src, part in enumerate(parts) if src != me], group).wait()
    return [_unpack(part) for part in parts]


def broadcast_object(obj: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Rank ``src``'s object, on every rank of the group; what others pass is ignored."""
    size, me = world_size(group), rank(group)
    check_rank("src", src, size)
    if size == 1:
        return obj
    if is_fake(group):
        note("broadcast_object", group, len(pickle.dumps(obj)), 1)
        return obj
    data = _pack(obj if me == src else None, group)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    dist.broadcast(length, group_src=src, group=group)
    if me != src:
        data = data.new_empty(int(length.item()))
    note("broadcast_object", group, data.numel(), 1)
    dist.broadcast(data, group_src=src, group=group)
    return obj if me == src else _unpack(data)


def _pack(obj: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    if backend_name(group, "cpu"):
        return data
    # A group made for an accelerator alone: the bytes have to travel through its memory.
    return data.to(torch.accelerator.current_accelerator())


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


def _sizes(data: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> list[int]:
    if is_fake(group):
        return [data.numel()] * size
    mine = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    return transport.gather_equal(mine, group, size).view(-1).tolist()


def _bounds(sizes: list[int]) -> list[int]:
    bounds = [0]
    for length in sizes:
        bounds.append(bounds[-1] + length)
    return bounds
