"""The collectives on a dimension of a tensor. Each returns a new tensor; on a group of one rank, the input itself.

Shapes are fractions of an axis: (B, S/N, H) is what one of N ranks holds of (B, S, H).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from colossalai.comm import transport
from colossalai.comm.check import compare
from colossalai.comm.collectives import check_op, even_bounds
from colossalai.comm.groups import rank, world_size
from colossalai.comm.ledger import note
from colossalai.utils.errors import ConfigError

__all__ = ["all_gather", "all_to_all", "all_to_all_uneven", "reduce_scatter_dim", "split"]


def all_gather(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate every rank's tensor along ``dim``, (..., D/N, ...) -> (..., D, ...). Any dtype; equal shapes."""
    size = world_size(group)
    dim = _dimension(tensor, dim, "dim")
    if size == 1:
        return tensor
    compare("all_gather", tensor, group, dim=dim)
    note("all_gather", group, tensor.numel() * size, tensor.element_size())
    return _join(transport.gather_equal(tensor.contiguous(), group, size), dim)


def reduce_scatter_dim(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None, op: str = "sum") -> torch.Tensor:
    """Sum or average over the group and keep this rank's part of ``dim``, (..., D, ...) -> (..., D/N, ...)."""
    check_op(op, tensor, ("sum", "mean"))
    size = world_size(group)
    dim = _dimension(tensor, dim, "dim", size)
    if size == 1:
        return tensor
    compare("reduce_scatter_dim", tensor, group, dim=dim, op=op)
    note("reduce_scatter_dim", group, tensor.numel(), tensor.element_size())
    pieces = _cut(tensor.detach(), dim, size)
    out = pieces.new_empty(pieces.shape[1:])
    transport.sum_into_slices(pieces.view(-1), even_bounds(pieces.numel(), size), out.view(-1), group, op).wait()
    return out


def all_to_all(tensor: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Cut along one dimension, join along another: (..., S, ..., G/N, ...) -> (..., S/N, ..., G, ...). Any dtype.

    Ulysses' exchange of heads for sequence is ``all_to_all(x, scatter_dim=2, gather_dim=1)``:
    (B, S/N, H, D) -> (B, S, H/N, D).
    """
    size = world_size(group)
    scatter_dim = _dimension(tensor, scatter_dim, "scatter_dim", size)
    gather_dim = _dimension(tensor, gather_dim, "gather_dim")
    if size == 1:
        return tensor
    compare("all_to_all", tensor, group, scatter_dim=scatter_dim, gather_dim=gather_dim)
    note("all_to_all", group, tensor.numel(), tensor.element_size())
    pieces = _cut(tensor.detach(), scatter_dim, size)
    received = torch.empty_like(pieces)
    if pieces.numel():
        transport.exchange_slices(received, pieces, None, None, group).wait()
    return _join(received, gather_dim)


def all_to_all_uneven(
    tensor: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send ``in_splits[r]`` rows of dim 0 to each rank r and receive ``out_splits[r]`` from it, in rank order.

    (sum(in_splits), ...) -> (sum(out_splits), ...). Any dtype; splits may be zero, and ``out_splits[r]`` must be what
    rank r
    sends here: a backend does not check that.
    """
    size, me = world_size(group), rank(group)
    for name, splits in (("in_splits", in_splits), ("out_splits", out_splits)):
        if len(splits) != size or min(splits) < 0:
            raise ConfigError(f"{name}={list(splits)} must be {size} counts of rows, one for each rank")
    if tensor.dim() == 0 or sum(in_splits) != tensor.shape[0]:
        raise ConfigError(f"in_splits={list(in_splits)} must sum to dim 0 of the tensor, of shape {tuple(tensor.shape)}")
    if in_splits[me] != out_splits[me]:
        raise ConfigError(f"rank {me} sends {in_splits[me]} rows to itself but expects {out_splits[me]}")
    if size == 1:
        return tensor
    sent_away = (tensor.shape[0] - in_splits[me]) * math.prod(tensor.shape[1:])
    note("all_to_all_uneven", group, tensor.numel(), tensor.element_size(), float(sent_away))
    source = tensor.detach().contiguous()
    received = source.new_empty((sum(out_splits), *source.shape[1:]))
    transport.exchange_slices(received, source, out_splits, in_splits, group).wait()
    return received


def split(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's part of ``dim``, a view, (..., D, ...) -> (..., D/N, ...). Nothing travels."""
    size = world_size(group)
    dim = _dimension(tensor, dim, "dim", size)
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank(group) * length, length)


def _cut(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """(..., D, ...) -> contiguous (N, ..., D/N, ...)."""
    return tensor.unflatten(dim, (size, tensor.shape[dim] // size)).movedim(dim, 0).contiguous()


def _join(pieces: torch.Tensor, dim: int) -> torch.Tensor:
    """(N, ..., D/N, ...) -> (..., D, ...); without a copy for dim 0."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _dimension(tensor: torch.Tensor, dim: int, name: str, divided_by: int = 1) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(f"{name}={dim} is no dimension of a tensor of shape {tuple(tensor.shape)}")
    if tensor.shape[dim] % divided_by:
        raise ConfigError(
            f"dimension {name}={dim} of shape {tuple(tensor.shape)} does not divide by the group's {divided_by} ranks: pad it"
        )
    return dim % tensor.dim()
