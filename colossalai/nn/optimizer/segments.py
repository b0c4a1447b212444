"""Whole-tensor norms for optimizers whose tensors may be only a piece of a larger one.

[Note: segment norms]

LAMB and LARS scale each tensor's update by norms of that *whole* tensor; LAMB's fused form also clips by the norm of
all gradients. Under ZeRO a rank steps flat segments, so the norm of what it holds is not the norm it needs. Such an
optimizer therefore never uses a norm of its own: it computes squared norms of what it has, and asks::

    whole = self.segment_norms(params, squares)               # (k, n) -> (k, n)
    every = self.segment_norms(params, squares, total=True)   # (k, n) -> (k,)

``params`` are the ``n`` local tensors (as they stand in the optimizer's groups), ``squares[i, j]`` the ``i``-th squared
norm of the part that is here of tensor ``j``. The answer holds, for the same tensors, the sum over all parts wherever
they are; with ``total`` the sums over all tensors of the model, those of which nothing is here included. Both stay on
the device.

Who shards sets ``optimizer.segment_norms`` on the instance (ZeRO: one stacked all-reduce by tensor index). To let that
be a collective, an optimizer asks the same number of times in every step on every rank, with an empty list where it has
nothing to do. That an optimizer has the attribute at all is how a plugin knows that it may be given flat segments.
"""

import torch
from torch import Tensor

from colossalai import comm

from .flat import local

_ROW = 1024
# Elements of a 16-bit tensor widened at a time: large enough to amortise the calls, small enough to stay in cache.
_WIDENED = 2**18


def own_norms(params: list[Tensor], squares: Tensor, total: bool = False) -> Tensor:
    """The default ``segment_norms``: tensors are whole, except DTensors, whose mesh says where their parts are."""
    squares = _sum_over_meshes(params, squares)
    return squares.sum(dim=1) if total else squares


def _sum_over_meshes(params: list[Tensor], squares: Tensor) -> Tensor:
    meshes: dict[tuple, list[int]] = {}
    for j, p in enumerate(params):
        mesh = getattr(p, "device_mesh", None)
        for dim, placement in enumerate(() if mesh is None else p.placements):
            if placement.is_shard():
                meshes.setdefault((mesh, dim), []).append(j)
    for (mesh, dim), columns in meshes.items():
        part = squares[:, columns]
        comm.all_reduce(part, group=mesh.get_group(dim))
        squares = squares.clone()
        squares[:, columns] = part
    return squares


def joined(squares: list[Tensor | None], rows: int, groups: list[dict]) -> Tensor:
    """Blocks of squared norms side by side: (rows, n). Without any, an empty one on the parameters' device."""
    found = [block for block in squares if block is not None]
    if not found:
        like = next((local(p) for group in groups for p in group["params"]), torch.zeros(0))
        return torch.zeros(rows, 0, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.cat([block.to(found[0].device) for block in found], dim=1)


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Squared L2 norm of each tensor: (n,), float32 (float64 if one of them is), on the first one's device.

    torch's reductions on the CPU add up in a few float32 lanes, which is off by 1e-3 at 25 million elements; these run
    over rows, to 1e-6 at any size and at the speed of memory. 16-bit tensors are widened in pieces, never as a whole.
    """
    if not tensors:
        return torch.zeros(0)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    device = tensors[0].device
    if all(t.device == device for t in tensors) and device.type == "cuda":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square()
    return torch.stack([_squared_norm(t).to(device=device, dtype=dtype) for t in tensors])


def _squared_norm(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.dtype.itemsize >= 4 or flat.device.type != "cpu":
        dtype = torch.promote_types(flat.dtype, torch.float32)
        return _row_squares(flat, dtype).sum()
    parts = [_row_squares(piece.float(), torch.float32).sum() for piece in flat.split(_WIDENED)]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _row_squares(flat: Tensor, dtype: torch.dtype) -> Tensor:
    body = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:body].view(-1, _ROW), dim=1, dtype=dtype)
    return torch.cat([rows, torch.linalg.vector_norm(flat[body:], dtype=dtype).reshape(1)]).square()
