"""The collectives on flat buffers and whole tensors; `transport` says how each backend carries them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from colossalai.comm import transport
from colossalai.comm.check import compare
from colossalai.comm.groups import rank, world_size
from colossalai.comm.ledger import note
from colossalai.comm.work import Work
from colossalai.utils.errors import ConfigError

__all__ = ["all_gather_into", "all_reduce", "broadcast", "even_bounds", "reduce_scatter"]

_OPS = ("sum", "mean", "max", "min")


def even_bounds(numel: int, size: int) -> list[int]:
    """Bounds of ``size`` equal slices of ``numel`` elements; ConfigError where they cannot be equal."""
    if numel % size:
        raise ConfigError(f"{numel} elements cannot be cut into {size} equal slices: pad the buffer or give its bounds")
    return [index * (numel // size) for index in range(size + 1)]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "sum", async_op: bool = False) -> Work:
    """Replace ``tensor`` on every rank by the elementwise sum, mean, maximum or minimum over the group, in place.

    16-bit sums and means are accumulated in float32 on gloo. At three ranks and more the order of summation depends on
    the position in the tensor. Where bits must not depend on how buffers are cut, use `reduce_scatter` and
    `all_gather_into`, which move the same volume.

    Args:
        tensor: any shape and strides, the same shape and dtype on all ranks.
        op: ``"sum"``, ``"mean"`` (floating dtypes), ``"max"`` or ``"min"``. On bool a sum is a logical or.
        async_op: return at once; ``tensor`` is valid after `Work.wait`.
    """
    check_op(op, tensor, _OPS)
    size = world_size(group)
    if size == 1 or tensor.numel() == 0:
        return Work()
    compare("all_reduce", tensor, group, op=op)
    note("all_reduce", group, tensor.numel(), tensor.element_size(), 2 * tensor.numel() * (size - 1) / size)
    return start(transport.sum_everywhere(tensor, group, size, op), async_op)


def reduce_scatter(
    flat: torch.Tensor,
    bounds: Sequence[int],
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> tuple[torch.Tensor, Work]:
    """Sum or average ``flat`` over the group and keep this rank's slice, (P,) -> (bounds[r+1] - bounds[r],).

    On gloo, and wherever slices are uneven or ``out_dtype`` differs, the sum runs in rank order with float32
    accumulation of 16-bit inputs, so that its bits do not depend on ``bounds``.

    Args:
        flat: 1-D, contiguous, the same length and dtype on all ranks. Unchanged, except where ``out`` is a part of it.
        bounds: N + 1 ascending integers, equal on all ranks; rank r owns ``flat[bounds[r]:bounds[r + 1]]``, which may
            be empty. The slices need not be equal.
        op: ``"sum"`` or ``"mean"`` (floating dtypes).
        out: 1-D, contiguous, where the slice goes; may be this rank's own slice of ``flat``. None for a new tensor.
        out_dtype: dtype of the result, ``flat``'s by default. float32 from 16 bits is the sum before rounding.
        async_op: return at once; leave ``flat`` alone and do not read the slice before `Work.wait`.

    Returns the slice and the work.
    """
    check_op(op, flat, _OPS[:2])
    size, me = world_size(group), rank(group)
    check_bounds(flat, bounds, size)
    data = flat.detach()
    own = data[bounds[me] : bounds[me + 1]]
    out = _slice_target(own, out, out_dtype)
    if size == 1:
        out.copy_(own)
        return out, Work()
    compare("reduce_scatter", flat, group, op=op, bounds=list(bounds), out_dtype=str(out.dtype))
    note("reduce_scatter", group, bounds[-1] - bounds[0], flat.element_size())
    return out, start(transport.sum_into_slices(data, bounds, out, group, op), async_op)


def all_gather_into(
    flat: torch.Tensor, bounds: Sequence[int], group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work:
    """Fill every rank's slice of ``flat`` from its owner, in place: afterwards ``flat`` is equal on all ranks.

    Args:
        flat: 1-D, contiguous, any dtype, the same length and dtype on all ranks; this rank's slice is valid on entry.
        bounds: as in `reduce_scatter`; slices may be uneven and empty.
        async_op: return at once; leave ``flat`` alone before `Work.wait`.
    """
    size = world_size(group)
    check_bounds(flat, bounds, size)
    if size == 1:
        return Work()
    compare("all_gather_into", flat, group, bounds=list(bounds))
    note("all_gather_into", group, bounds[-1] - bounds[0], flat.element_size())
    return start(transport.fill_slices(flat, bounds, group), async_op)


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Work:
    """Replace ``tensor`` by that of rank ``src`` *of the group*, in place. Any dtype and strides; equal shapes."""
    size = world_size(group)
    check_rank("src", src, size)
    if size == 1 or tensor.numel() == 0:
        return Work()
    compare("broadcast", tensor, group, src=src)
    note("broadcast", group, tensor.numel(), tensor.element_size())
    target = tensor.detach()
    buffer = target.contiguous()
    handle = dist.broadcast(transport.movable(buffer), group_src=src, group=group, async_op=True)

    def finish() -> None:
        if buffer is not target and rank(group) != src:
            target.copy_(buffer)

    return start(Work([handle], finish, keep=(tensor, buffer)), async_op)


def start(work: Work, async_op: bool) -> Work:
    """``work``, already waited for unless ``async_op``."""
    if not async_op:
        work.wait()
    return work


def check_rank(name: str, value: int, size: int) -> None:
    """ConfigError unless ``value`` is a rank of a group of ``size``."""
    if not 0 <= value < size:
        raise ConfigError(f"{name}={value} must be a rank within the group, 0 to {size - 1}")


def check_op(op: str, tensor: torch.Tensor, known: Sequence[str]) -> None:
    """ConfigError unless ``op`` is known and can be computed in the tensor's dtype."""
    if op not in known:
        raise ConfigError(f"op={op!r} must be one of {', '.join(map(repr, known))}")
    if op == "mean" and not tensor.is_floating_point():
        raise ConfigError(f'op="mean" needs a floating dtype, got {tensor.dtype}: use op="sum" and divide')
    if tensor.dtype not in transport.MOVABLE:
        raise ConfigError(f"{tensor.dtype} cannot be reduced: convert it to float32 or bfloat16 first")


def check_bounds(flat: torch.Tensor, bounds: Sequence[int], size: int) -> None:
    """ConfigError unless ``flat`` is a flat buffer and ``bounds`` cut it for ``size`` ranks."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigError(f"flat must be 1-D and contiguous, got shape {tuple(flat.shape)}, strides {flat.stride()}")
    ascending = all(low <= high for low, high in pairwise(bounds))
    if len(bounds) != size + 1 or not ascending or bounds[0] < 0 or bounds[-1] > flat.numel():
        raise ConfigError(f"bounds={list(bounds)} must be {size + 1} ascending integers within 0..{flat.numel()} for {size} ranks")


def _slice_target(own: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.Tensor:
    if out is None:
        return torch.empty_like(own, dtype=out_dtype or own.dtype)
    if tuple(out.shape) != tuple(own.shape) or not out.is_contiguous():
        raise ConfigError(f"out must be contiguous of shape {tuple(own.shape)}, got {tuple(out.shape)}")
    if out_dtype not in (None, out.dtype):
        raise ConfigError(f"out has dtype {out.dtype} but out_dtype={out_dtype}: give one of the two")
    return out.detach()
