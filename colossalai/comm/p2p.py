"""Messages between two ranks, and tensors assembled on one rank from pieces of any size.

Messages from one rank to another within a group arrive in the order they were sent.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from colossalai.comm.collectives import check_rank, start
from colossalai.comm.groups import rank, world_size
from colossalai.comm.ledger import note
from colossalai.comm.transport import movable
from colossalai.comm.work import Work
from colossalai.utils.errors import ConfigError

__all__ = ["gather_pieces", "recv", "scatter_pieces", "send", "send_recv"]

Message = tuple[torch.Tensor, int]


def send(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Work:
    """Send ``tensor`` to rank ``dst`` of the group, which must `recv` one of the same shape and dtype. Any dtype."""
    return send_recv([(tensor, dst)], [], group, async_op)


def recv(tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Work:
    """Receive from rank ``src`` of the group into ``tensor``, which must have the shape and dtype of what is sent."""
    return send_recv([], [(tensor, src)], group, async_op)


def send_recv(
    sends: Sequence[Message],
    recvs: Sequence[Message],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work:
    """Start all of ``sends`` [(tensor, destination)] and ``recvs`` [(tensor, source)] together.

    Peers are ranks of the group. It is one batch, so that ranks which send to each other do not wait for each other.
    With ``async_op`` leave all tensors alone before `Work.wait`.
    """
    size, me = world_size(group), rank(group)
    for name, messages in (("sends", sends), ("recvs", recvs)):
        for _, peer in messages:
            check_rank(f"{name}: peer", peer, size)
            if peer == me:
                raise ConfigError(f"{name}: rank {me} cannot exchange messages with itself; copy the tensor instead")
    for tensor, _ in sends:
        note("send", group, tensor.numel(), tensor.element_size(), float(tensor.numel()))
    for tensor, _ in recvs:
        note("recv", group, tensor.numel(), tensor.element_size(), 0.0)
    return start(start_batch(sends, recvs, group), async_op)


def gather_pieces(
    piece: torch.Tensor, sizes: Sequence[int], dst: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor | None:
    """Assemble a tensor on rank ``dst`` from every rank's piece, (sizes[r],) -> (sum(sizes),) there, None elsewhere.

    Args:
        piece: 1-D, any dtype, the same on all ranks; left as it is.
        sizes: elements of each rank's piece, equal on all ranks; zeros send nothing.
        dst: rank within the group.
    """
    size, me = world_size(group), rank(group)
    _check_pieces(piece, sizes, size, me, "dst", dst)
    if size == 1:
        return piece.detach().clone()
    total = sum(sizes)
    note("gather_pieces", group, total, piece.element_size(), float(0 if me == dst else piece.numel()))
    if me != dst:
        start_batch([(piece, dst)], [], group).wait()
        return None
    whole = piece.detach().new_empty(total)
    views = whole.split(list(sizes))
    views[dst].copy_(piece.detach())
    start_batch([], [(view, src) for src, view in enumerate(views) if src != dst], group).wait()
    return whole


def scatter_pieces(
    whole: torch.Tensor | None,
    out: torch.Tensor,
    sizes: Sequence[int],
    src: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The reverse of `gather_pieces`: rank ``src`` deals ``whole`` out, (sum(sizes),) -> (sizes[r],) on each rank.

    Args:
        whole: 1-D, on rank ``src``; ignored elsewhere.
        out: 1-D of ``sizes[r]`` elements, dtype and device of ``whole``. Returned.
        sizes: elements of each rank's piece, equal on all ranks.
        src: rank within the group.
    """
    size, me = world_size(group), rank(group)
    _check_pieces(out, sizes, size, me, "src", src)
    total = sum(sizes)
    if me == src and (whole is None or tuple(whole.shape) != (total,) or whole.dtype != out.dtype):
        given = "None" if whole is None else f"shape {tuple(whole.shape)} of {whole.dtype}"
        raise ConfigError(f"whole must be of shape ({total},) and {out.dtype} on rank {src}, got {given}")
    if size > 1:
        note("scatter_pieces", group, total, out.element_size(), float(total - out.numel() if me == src else 0))
    if me != src:
        start_batch([], [(out, src)], group).wait()
        return out
    views = whole.detach().split(list(sizes))
    out.detach().copy_(views[src])
    start_batch([(view, dst) for dst, view in enumerate(views) if dst != src], [], group).wait()
    return out


def start_batch(sends: Sequence[Message], recvs: Sequence[Message], group: dist.ProcessGroup | None) -> Work:
    operations: list[dist.P2POp] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(call: Callable, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        buffer = tensor.detach().contiguous()
        operations.append(dist.P2POp(call, movable(buffer), group=group, group_peer=peer))
        return buffer

    # Both sides know the shape, so nothing needs to travel where there is nothing.
    for tensor, peer in sends:
        if tensor.numel():
            add(dist.isend, tensor, peer)
    for tensor, peer in recvs:
        if not tensor.numel():
            continue
        buffer = add(dist.irecv, tensor, peer)
        if not tensor.is_contiguous():
            copies.append((tensor.detach(), buffer))
    if not operations:
        return Work()

    def finish() -> None:
        for tensor, buffer in copies:
            tensor.copy_(buffer)

    return Work(dist.batch_isend_irecv(operations), finish, keep=(operations, sends, recvs))


def _check_pieces(piece: torch.Tensor, sizes: Sequence[int], size: int, me: int, name: str, peer: int) -> None:
    check_rank(name, peer, size)
    if len(sizes) != size or min(sizes) < 0:
        raise ConfigError(f"sizes={list(sizes)} must be {size} counts of elements, one for each rank")
    if tuple(piece.shape) != (sizes[me],):
        raise ConfigError(f"rank {me}'s piece has shape {tuple(piece.shape)}, but sizes={list(sizes)} says ({sizes[me]},)")
