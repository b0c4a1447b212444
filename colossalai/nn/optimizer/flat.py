"""How an optimizer walks over its tensors: flat, in batches, in the widest speed the device has.

[Note: rows]

A *row* is one parameter with what goes with it, ``(param, grad, *state)``, all of one shape; ``update`` takes a list of
rows and two forms of the same arithmetic on lists of tensors:

``fused``
    a kernel of torch's that reads and writes everything once (five to seven times a foreach chain on a CPU). It wants
    all tensors in one dtype and memory order.
``plain``
    the same in foreach calls, for devices without the kernel and for tensors that are not dense. It gets float32 (or
    wider) copies of 16-bit tensors, and what it changed is rounded back.

A gradient of another dtype than its parameter, or one to be divided, is converted a batch at a time into scratch: a
full copy of the gradients in the parameters' dtype never exists, and ``grad`` itself is left as it was.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Row = tuple[Tensor, ...]
Scale = float | Tensor
Update = Callable[..., None]

FUSED_DEVICES = ("cpu", "cuda")
# Elements a batch: on a CPU scratch that stays in cache, on a device enough to fill it.
BATCH = {"cpu": 2**18}
DEVICE_BATCH = 2**24


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie one after the other in memory, in whatever order of dims."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return tensor.permute(order).is_contiguous()


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same places."""
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def flattened(row: Row) -> Row | None:
    """The row as 1-D views in memory order; a gradient in another order is copied. None if that cannot be done."""
    param, grad, *state = row
    if not is_dense(param) or not all(is_dense(t) and same_order(t, param) for t in state):
        return None
    if not (is_dense(grad) and same_order(grad, param)):
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return tuple(t.as_strided((t.numel(),), (1,)) for t in (param, grad, *state))


def batches(rows: list[Row], limit: int) -> Iterator[list[tuple[int, Row]]]:
    """Flat rows in batches of at most ``limit`` elements: lists of (index of the row, piece of the row), in order."""
    batch, room = [], limit
    for index, row in enumerate(rows):
        start, size = 0, row[0].numel()
        while start < size:
            stop = min(size, start + room)
            piece = row if stop - start == size else tuple(t[start:stop] for t in row)
            batch.append((index, piece))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def batch_limit(device: torch.device) -> int:
    return BATCH.get(device.type, DEVICE_BATCH)


def columns(rows: list[Row]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]


def divides(scale: Scale) -> bool:
    """Whether ``div_scale`` asks for a division; numbers up to 0 (the default is -1) and 1 do not."""
    return isinstance(scale, Tensor) or (scale > 0 and scale != 1)


class Wide:
    """Float32 stand-ins for 16-bit tensors; ``close`` rounds what was computed back into the originals."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensors: list[Tensor], write: bool = True) -> list[Tensor]:
        wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
        if write:
            self._pairs += [(t, w) for t, w in zip(tensors, wide, strict=True) if w is not t]
        return wide

    def close(self) -> None:
        for tensor, wide in self._pairs:
            tensor.copy_(wide)
        self._pairs.clear()


def scaled_grads(grads: list[Tensor], like: list[Tensor], scale: Scale) -> list[Tensor]:
    """The gradients in the dtypes of ``like``, divided by ``scale``; the very tensors where nothing is to be done."""
    if divides(scale):
        factor = scale.to(like[0].device) if isinstance(scale, Tensor) else scale
        return [g.to(dtype=p.dtype, copy=True).div_(factor) for g, p in zip(grads, like, strict=True)]
    return [g.to(p.dtype) for g, p in zip(grads, like, strict=True)]


def update(rows: list[Row], fused: Update | None, plain: Update, div_scale: Scale = -1) -> None:
    """Apply ``fused`` to ``rows`` where there is one that can run, else ``plain``.

    Gradients are divided by a positive ``div_scale``. Both are called with one list of tensors a column, all of one
    device; each row is met exactly once, maybe in pieces.
    """
    kinds: dict[tuple, list[Row]] = {}
    for row in rows:
        if row[0].numel() == 0:
            continue
        flat = flattened(row)
        param = row[0]
        fusable = fused is not None and flat is not None and param.device.type in FUSED_DEVICES
        fusable = fusable and all(t.dtype == param.dtype for t in flat[2:])
        if not fusable:
            kind = "plain" if flat is not None else "whole"
        elif row[1].dtype == param.dtype and not divides(div_scale):
            kind = "fused"
        else:
            kind = "staged"
        kinds.setdefault((kind, param.device, param.dtype), []).append(row if flat is None else flat)
    for (kind, device, _dtype), same in kinds.items():
        if kind == "fused":
            fused(*columns(same))
        elif kind == "whole":
            _plain(same, plain, div_scale)
        else:
            for batch in batches(same, batch_limit(device)):
                pieces = [piece for _, piece in batch]
                if kind == "plain":
                    _plain(pieces, plain, div_scale)
                else:
                    _staged(pieces, fused, div_scale)


def _staged(rows: list[Row], fused: Update, div_scale: Scale) -> None:
    """One batch through ``fused`` with its gradients in scratch."""
    params, grads, *state = columns(rows)
    scratch = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
    pieces = list(scratch.split([p.numel() for p in params]))
    scale = div_scale.to(scratch.device) if isinstance(div_scale, Tensor) else div_scale
    if divides(scale) and all(g.dtype == scratch.dtype for g in grads):
        for piece, grad in zip(pieces, grads, strict=True):
            torch.div(grad, scale, out=piece)
    else:
        torch._foreach_copy_(pieces, grads)
        if divides(scale):
            scratch.div_(scale)
    fused(params, pieces, *state)


def _plain(rows: list[Row], plain: Update, div_scale: Scale) -> None:
    params, grads, *state = columns(rows)
    wide = Wide()
    params, state = wide(params), [wide(column) for column in state]
    plain(params, scaled_grads(grads, params, div_scale), *state)
    wide.close()
