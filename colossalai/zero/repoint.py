"""The user's optimizer object, made to work on this rank's segments: groups and state are re-pointed in place."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bucket import Slot


def repoint(optim: Optimizer, slots: dict[nn.Parameter, Slot]) -> None:
    """Put each parameter's segment in its place in ``optim``'s groups, and cut the state it has so far likewise.

    The group dictionaries and the optimizer stay the same objects, so schedulers built on them go on working. A parameter that
    this rank holds nothing of drops out of its group, a frozen one too.
    """
    for group in optim.param_groups:
        kept = [slots[p].segment for p in group["params"] if p in slots]
        group["params"][:] = [segment for segment in kept if segment is not None]
    for param in [p for p in optim.state if p in slots]:
        state, slot = optim.state.pop(param), slots[param]
        if slot.segment is not None:
            optim.state[slot.segment] = {key: cut_state(value, slot) for key, value in state.items()}


def cut_state(value: Any, slot: Slot) -> Any:
    """This rank's part of one entry of a parameter's state: tensors of the parameter's shape are cut, others kept."""
    if not isinstance(value, Tensor) or value.shape != slot.layout.shape:
        return value
    return cut_tensor(value, slot)


def cut_tensor(full: Tensor, slot: Slot) -> Tensor:
    """The elements of ``full`` (the parameter's shape) that this rank's segment holds, as a copy in the segment's shape."""
    piece = slot.layout.piece(full, slot.bucket.rank)
    if slot.bucket.owners is not None:
        piece = slot.layout.unflatten(piece)
    return piece.to(device=slot.segment.device, copy=True)


class SegmentNorms:
    """Squared norms of whole tensors from squared norms of their segments: one all-reduce for all of them.

    Set as ``optimizer.segment_norms``; see :mod:`colossalai.nn.optimizer.segments`.
    """

    def __init__(self, slots: list[Slot], group, total: "callable") -> None:
        self._index = {slot.segment: i for i, slot in enumerate(slots) if slot.segment is not None}
        self._count, self._group, self._total = len(slots), group, total

    def __call__(self, params: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """``squares[k]``: (n,) squared norms of some tensors like ``params[k]``; returns those over all ranks."""
        if not params:
            return self._total(None, self._count)
        raise NotImplementedError
