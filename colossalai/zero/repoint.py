"""The user's optimizer object, made to work on this rank's segments: groups and state are re-pointed in place."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm

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
            optim.state[slot.segment] = {key: cut_state(key, value, slot) for key, value in state.items()}


def is_cut(key: str, value: Any, slot: Slot) -> bool:
    """Whether an entry of a whole parameter's state goes along with its elements: a tensor of its shape, but for the counter."""
    return isinstance(value, Tensor) and value.shape == slot.layout.shape and key != "step"


def cut_state(key: str, value: Any, slot: Slot) -> Any:
    """This rank's part of one entry of a parameter's whole state; what is not cut stays as it is."""
    return cut_tensor(value, slot) if is_cut(key, value, slot) else value


def cut_tensor(full: Tensor, slot: Slot) -> Tensor:
    """The elements of ``full`` (the parameter's shape) that this rank's segment holds, as a copy in the segment's shape."""
    piece = slot.layout.piece(full, slot.bucket.rank)
    if slot.bucket.owners is not None:
        piece = slot.layout.unflatten(piece)
    return piece.to(device=slot.segment.device, copy=True)


class SegmentNorms:
    """Squared norms of whole tensors from those of their segments: one all-reduce for all tensors of a group.

    Set as ``optimizer.segment_norms``; :mod:`colossalai.nn.optimizer.segments` says what is asked and answered.

    Args:
        groups: (process group, all slots whose parameters are cut over it, in an order that all its ranks share).
        widest: where there are several, the group that contains them: totals are taken over it.
    """

    def __init__(self, groups: list[tuple[Any, list[Slot]]], widest: Any = None) -> None:
        self._groups, self._widest = [], widest
        for group, slots in groups:
            index = {slot.segment: i for i, slot in enumerate(slots) if slot.segment is not None}
            master = slots[0].bucket.master  # a rank without any segment must send a table like everybody's
            self._groups.append((group, len(slots), index, torch.promote_types(master.dtype, torch.float32), master.device))

    def __call__(self, params: list[Tensor], squares: Tensor, total: bool = False) -> Tensor:
        """(k, n) squared norms of what is here of ``params`` -> the same of the whole tensors; with ``total`` their sums, (k,)."""
        whole, sums = squares.clone(), 0.0
        for group, count, index, dtype, device in self._groups:
            columns = [j for j, p in enumerate(params) if p in index]
            places = [index[params[j]] for j in columns]
            table = torch.zeros(squares.shape[0], count, dtype=dtype, device=device)
            table[:, places] = squares[:, columns].to(dtype)
            comm.all_reduce(table, group=group)
            whole[:, columns] = table[:, places].to(whole.dtype)
            sums = sums + table.sum(dim=1) / (comm.world_size(group) if len(self._groups) > 1 else 1)
        if total and len(self._groups) > 1:  # the others' groups of parameters count too
            comm.all_reduce(sums, group=self._widest)
        return sums if total else whole
