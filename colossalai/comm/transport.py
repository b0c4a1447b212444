"""How each backend carries the collectives: no argument checks and no ledger. Only this package uses it.

[Note: one algorithm per backend]
NCCL has its own kernels and they are used wherever they can express the operation. gloo's reduce-scatter moves as much
as an all-reduce and its all-gather copies every slice twice, so there a reduce-scatter is an all-to-all of the slices
and a local sum, and an all-gather is one broadcast a slice straight into the buffer. The local sum runs in rank order,
in float32 for 16-bit inputs: an element's result depends on its N contributions and on nothing else, so cutting a
buffer into other buckets changes no bit, at any number of ranks. All-reduce is the backend's own: at three ranks and
more its order of summation depends on the position in the buffer.

Every operation has one phase: `Work.wait` may sum locally but never communicates, so ranks may wait in different
orders.
"""

import math
import threading
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from colossalai.comm.groups import backend_name, rank
from colossalai.comm.work import Work

# torch 2.13 renames these two and warns about the old names.
_reduce_scatter_native = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_native = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

HALF = (torch.float16, torch.bfloat16)
# What every backend moves as it is. Anything else (float8, complex) travels as bytes.
MOVABLE = frozenset((*HALF, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool))
# Elements one pass of the local sum works on, so that the running total stays in a core's cache.
_SUM_CHUNK = 1 << 17


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous ``tensor`` as backends can move it: itself, or its bytes (the seam for wire formats)."""
    return tensor if tensor.dtype in MOVABLE else tensor.reshape(-1).view(torch.uint8)


def has_average(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> bool:
    """Whether the backend averages by itself, without a 16-bit sum overflowing on the way."""
    return backend_name(group, tensor.device.type) in ("nccl", "fake")


def is_even(bounds: Sequence[int]) -> bool:
    """Whether all slices have one length."""
    return len({high - low for low, high in pairwise(bounds)}) == 1


def sum_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup | None, size: int, op: str) -> Work:
    """All-reduce in place; ``op`` sum, mean, max or min; ``tensor`` of any strides."""
    native_mean = op == "mean" and has_average(group, tensor)
    reduce_op = dist.ReduceOp.AVG if native_mean else _REDUCE_OPS[op]
    target = tensor.detach()
    buffer, staged = target.contiguous(), None
    if op in ("sum", "mean") and _rounds_on_the_way(target, group, size, op):
        staged = staging.take(target.numel(), torch.float32, target.device)
        buffer = staged.view(target.shape).copy_(target)
    handle = dist.all_reduce(buffer, reduce_op, group, async_op=True)

    def finish() -> None:
        if op == "mean" and not native_mean:
            buffer.div_(size)
        if buffer is not target:
            target.copy_(buffer)
        if staged is not None:
            staging.give(staged)

    return Work([handle], finish, keep=(tensor, buffer))


def sum_into_slices(flat: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, group: dist.ProcessGroup | None, op: str) -> Work:
    """Reduce-scatter of ``flat[bounds[0]:bounds[-1]]`` into ``out``, which may be this rank's slice of it."""
    cut, me = flat[bounds[0] : bounds[-1]], rank(group)
    size = len(bounds) - 1
    if cut.numel() == 0:
        return Work()
    backend = backend_name(group, flat.device.type)
    if backend == "gloo" or not is_even(bounds) or out.dtype != flat.dtype:
        return _sum_by_exchange(cut, bounds, out, group, op, on_host=backend == "gloo")
    if backend == "fake":
        # Nothing travels there, and an uninitialised result would put NaN into a step that runs true kernels.
        out.copy_(flat[bounds[me] : bounds[me + 1]])
    native_mean = op == "mean" and has_average(group, cut)
    reduce_op = dist.ReduceOp.AVG if native_mean else dist.ReduceOp.SUM
    handle = _reduce_scatter_native(out, cut, op=reduce_op, group=group, async_op=True)

    def finish() -> None:
        if op == "mean" and not native_mean:
            out.div_(size)

    return Work([handle], finish, keep=(cut, out))


def fill_slices(flat: torch.Tensor, bounds: Sequence[int], group: dist.ProcessGroup | None) -> Work:
    """All-gather in place: every rank's slice of ``flat`` is filled from its owner."""
    data = flat.detach()
    if bounds[0] == bounds[-1]:
        return Work()
    if backend_name(group, flat.device.type) != "gloo" and is_even(bounds):
        me = rank(group)
        whole, own = data[bounds[0] : bounds[-1]], data[bounds[me] : bounds[me + 1]]
        return Work([_all_gather_native(movable(whole), movable(own), group=group, async_op=True)], keep=(flat,))
    handles = [
        dist.broadcast(movable(data[low:high]), group_src=src, group=group, async_op=True)
        for src, (low, high) in enumerate(pairwise(bounds))
        if low < high
    ]
    return Work(handles, keep=(flat,))


def exchange_slices(
    received: torch.Tensor,
    sent: torch.Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> dist.Work | None:
    """All-to-all along dim 0 of two contiguous tensors; splits in rows, None for equal ones."""
    sent, received = _rows_movable(sent.detach()), _rows_movable(received.detach())
    return dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=None if out_splits is None else list(out_splits),
        input_split_sizes=None if in_splits is None else list(in_splits),
        group=group,
        async_op=True,
    )


def gather_equal(tensor: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
    """Contiguous (*shape) of every rank -> (N, *shape)."""
    source = tensor.detach()
    whole = source.new_empty((size, *source.shape))
    if source.numel() == 0:
        return whole
    if backend_name(group, source.device.type) == "gloo":
        whole[rank(group)].copy_(source)
        fill_slices(whole.view(-1), [source.numel() * index for index in range(size + 1)], group).wait()
    else:
        _all_gather_native(movable(whole.view(-1)), movable(source.view(-1)), group=group)
    return whole


def sum_in_rank_order(pieces: torch.Tensor, out: torch.Tensor, divisor: int | None = None) -> None:
    """(N, m) -> ``out`` (m,): pieces[0] + pieces[1] + ..., in float32 for 16 bits, divided before the one rounding."""
    wide = _wide(pieces.dtype)
    for low in range(0, pieces.shape[1], _SUM_CHUNK):
        part, target = pieces[:, low : low + _SUM_CHUNK], out[low : low + _SUM_CHUNK]
        total = target if target.dtype == wide else torch.empty_like(target, dtype=wide)
        if part.dtype == wide and part.shape[0] > 1:
            torch.add(part[0], part[1], out=total)
            rest = part[2:]
        else:
            total.copy_(part[0])
            rest = part[1:]
        for piece in rest:
            total.add_(piece)
        if divisor is not None:
            total.div_(divisor)
        if total is not target:
            target.copy_(total)


class _Staging:
    """Two receive buffers kept for reuse in host memory, where fresh pages cost more than the transfer itself.

    glibc maps anything over 32 MiB anew each time: 96 MiB took 86 ms to reduce-scatter with fresh pages against 30 with
    kept ones (2 ranks). Devices have caching allocators and get plain tensors.
    """

    _KEPT = 2
    _WORTH_BYTES = 1 << 20

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor of ``numel`` elements with arbitrary content."""
        nbytes = numel * dtype.itemsize
        if device.type == "cpu" and nbytes >= self._WORTH_BYTES:
            with self._lock:
                for index, buffer in enumerate(self._free):
                    # A buffer far too large would stay in use for small work.
                    if nbytes <= buffer.numel() <= 2 * nbytes:
                        return self._free.pop(index)[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Take a buffer back; nobody may use it from here on."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.nbytes() < self._WORTH_BYTES or type(tensor) is not torch.Tensor:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        with self._lock:
            self._free = [whole, *self._free][: self._KEPT]


staging = _Staging()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is summed in."""
    return torch.float32 if dtype in HALF else dtype


def _rows_movable(tensor: torch.Tensor) -> torch.Tensor:
    """`movable`, but dim 0 keeps counting rows."""
    if tensor.dtype in MOVABLE:
        return tensor
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:])).view(torch.uint8)


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _rounds_on_the_way(tensor: torch.Tensor, group: dist.ProcessGroup | None, size: int, op: str) -> bool:
    """Whether gloo would round, or overflow, between the contributions: it adds 16-bit numbers in 16 bits.

    Two contributions are added once, and rounded once as they must be; only a float16 mean can overflow before it is
    halved.
    """
    if tensor.dtype not in HALF or backend_name(group, tensor.device.type) != "gloo":
        return False
    return size > 2 or (op == "mean" and tensor.dtype == torch.float16)


def _sum_by_exchange(
    cut: torch.Tensor,
    bounds: Sequence[int],
    out: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: str,
    on_host: bool,
) -> Work:
    size = len(bounds) - 1
    divisor = size if op == "mean" else None
    numel = size * out.numel()
    pieces = staging.take(numel, cut.dtype, cut.device) if on_host else cut.new_empty(numel)
    sent = [high - low for low, high in pairwise(bounds)]
    handle = exchange_slices(pieces, cut, [out.numel()] * size, sent, group)

    def finish() -> None:
        table = pieces.view(size, out.numel())
        if on_host:
            sum_in_rank_order(table, out, divisor)
            staging.give(pieces)
        else:
            total = table.sum(0, dtype=_wide(table.dtype))
            out.copy_(total if divisor is None else total.div_(divisor))

    return Work([handle], finish, keep=(cut, pieces, out))
