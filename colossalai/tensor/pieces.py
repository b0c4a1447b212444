"""From the pieces of the ranks to the whole tensor."""

from typing import Optional

import torch
from torch import Tensor

from colossalai import comm

from .layout import Layout


def assemble(piece: Optional[Tensor], layout: Layout, group=None, dst: int = 0, device="cpu") -> Optional[Tensor]:
    """The whole tensor, in its logical shape, on rank ``dst`` of ``group``; None on the others. Collective.

    Args:
        piece: this rank's elements in memory order (any shape), or None where its interval is empty.
        layout: how the tensor is cut over ``group``.
        device: where the whole tensor goes to.
    """
    if layout.intervals is None:
        return piece.detach().to(device, copy=True).view(layout.shape) if comm.rank(group) == dst else None
    sizes = [stop - start for start, stop in layout.intervals]
    flat = comm.gather_pieces(piece, sizes, dst, group)
    return None if flat is None else layout.unflatten(flat.to(device))
