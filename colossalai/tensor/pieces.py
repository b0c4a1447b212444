"""From the pieces of the ranks to the whole tensor."""

import torch
from torch import Tensor

from colossalai import comm

from .layout import Layout


def assemble(piece: Tensor | None, layout: Layout, dtype: torch.dtype, group=None, dst: int = 0) -> Tensor | None:
    """The whole tensor, in its logical shape, on rank ``dst`` of ``group``; None on the others. Collective.

    Args:
        piece: this rank's elements in memory order, in any shape; None where its interval is empty.
        layout: how the tensor is cut over ``group``.
        dtype: of the tensor, for the ranks that hold nothing of it.
    """
    if layout.intervals is None:
        return piece.detach().clone() if comm.rank(group) == dst else None
    sizes = [stop - start for start, stop in layout.intervals]
    own = torch.empty(0, dtype=dtype) if piece is None else piece.detach()
    flat = own.reshape(-1) if layout.order is None or own.dim() < 2 else own.permute(layout.order).reshape(-1)
    whole = comm.gather_pieces(flat, sizes, dst, group)
    return None if whole is None else layout.unflatten(whole)
