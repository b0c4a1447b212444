"""Collectives with a gradient, named by what happens to the data; each is the adjoint of another one of this file.

    forward                                     backward
    copy             identity                   all-reduce
    reduce           all-reduce                 identity
    gather           all-gather                 this rank's part
    scatter          this rank's part           all-gather
    gather_reduce    all-gather                 reduce-scatter
    reduce_scatter   reduce-scatter             all-gather
    exchange         all-to-all                 all-to-all the other way
    shift            to the rank at +offset     to the rank at -offset

[Note: which gather]
A replicated tensor is one number held N times, and its gradient is held N times as well: not summed. `gather` and
`scatter` are
for that case: what follows the gather is computed alike on all ranks. `gather_reduce` is for a result that ranks use
differently, so that each has only a part of the gradient. `copy` and `reduce` are the two ends of such a stretch.

With one rank each returns its input. Bytes are n = one rank's payload on the larger side, ring formulas (see `ledger`).
All can be differentiated twice. Where x has another dtype than its gradient, autograd casts.
"""

import torch
import torch.distributed as dist

from colossalai.comm import collectives, p2p, shaped
from colossalai.comm.groups import rank, world_size

__all__ = ["copy", "exchange", "gather", "gather_reduce", "reduce", "reduce_scatter", "scatter", "shift"]

Group = dist.ProcessGroup | None


def copy(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Enter a stretch in which ranks compute different parts: (B, S, H) -> the same.

    Forward nothing travels; backward the gradient is all-reduced, 2n(N-1)/N bytes a rank.
    """
    return x if world_size(group) == 1 else _Copy.apply(x, group)


def reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Leave such a stretch, partial sums to the sum: (B, S, H) partial -> (B, S, H).

    Forward an all-reduce, 2n(N-1)/N bytes a rank; backward nothing travels.
    """
    return x if world_size(group) == 1 else _Reduce.apply(x, group)


def gather(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Parts to a replicated whole: (B, S/N, H) -> (B, S, H) for ``dim=1``.

    Forward an all-gather, n(N-1)/N bytes a rank; backward each keeps its part of the gradient, which must be equal on
    all.
    """
    return x if world_size(group) == 1 else _Gather.apply(x, dim, group)


def scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """A replicated whole to parts: (B, S, H) -> (B, S/N, H) for ``dim=1``.

    Forward nothing travels; backward an all-gather, n(N-1)/N bytes a rank. ConfigError if ``dim`` does not divide.
    """
    return x if world_size(group) == 1 else _Scatter.apply(x, dim, group)


def gather_reduce(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Parts to a whole that ranks use differently: (B, S/N, H) -> (B, S, H) for ``dim=1``.

    Forward an all-gather, backward a reduce-scatter, each n(N-1)/N bytes a rank.
    """
    return x if world_size(group) == 1 else _GatherReduce.apply(x, dim, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Partial sums to this rank's part of the sum: (B, S, H) partial -> (B, S/N, H) for ``dim=1``.

    Forward a reduce-scatter, backward an all-gather, each n(N-1)/N bytes a rank. ConfigError if ``dim`` does not
    divide.
    """
    return x if world_size(group) == 1 else _ReduceScatter.apply(x, dim, group)


def exchange(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: Group = None) -> torch.Tensor:
    """Cut one dimension, join another: (B, S/N, H, D) -> (B, S, H/N, D) for ``scatter_dim=2, gather_dim=1``.

    An all-to-all each way, n(N-1)/N bytes a rank. ConfigError if ``scatter_dim`` does not divide.
    """
    return x if world_size(group) == 1 else _Exchange.apply(x, scatter_dim, gather_dim, group)


def shift(x: torch.Tensor, offset: int = 1, group: Group = None) -> torch.Tensor:
    """Around the ring: rank r gets what rank r - offset had, any shape -> the same.

    n bytes a rank each way. An offset that is a multiple of N returns the input.
    """
    return x if offset % world_size(group) == 0 else _Shift.apply(x, offset, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return copy(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return shaped.all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return scatter(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        # A copy, so that the whole need not stay alive for the sake of a part.
        return shaped.split(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.dim, ctx.group), None, None


class _GatherReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return shaped.all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return shaped.reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_reduce(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter_dim, gather_dim, group):
        ctx.dims, ctx.group = (gather_dim, scatter_dim), group
        return shaped.all_to_all(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.dims, ctx.group), None, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offset, group):
        ctx.offset, ctx.group = offset, group
        size, me = world_size(group), rank(group)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        p2p.send_recv([(x, (me + offset) % size)], [(received, (me - offset) % size)], group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, -ctx.offset, ctx.group), None, None
