"""Flat buckets: parameters that travel together.

[Note: the tensors of a bucket]

    flat      (size,)   working dtype      the parameters; every parameter of the bucket is a view into it
    local     (size,)   working dtype      this rank's own gradients, before any communication; fp32 from a second backward on
    reduced   (slice,)  fp32               mean over the ranks of this rank's slice of ``local``
    master    (slice,)  fp32               what the optimizer steps: ``flat``'s own slice where that is fp32 already

``slice`` is ``bounds[r]:bounds[r + 1]`` of ``size`` for rank ``r`` of the bucket's group. ``local`` and ``reduced`` exist only
between a backward and the step; ``master`` is cut once more into the segments that the optimizer sees, one for each parameter
that the slice overlaps. Each parameter, and each equal slice, starts on a 128-byte boundary: kernels want 16, and a cache line
is never shared by two ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossalai import comm
from colossalai.tensor import Layout, memory_order
from colossalai.utils.errors import LayoutError

ALIGN_BYTES = 128
# A model is cut in about this many buckets even where one would hold it all: the first can only be reduced while the rest is computed
# if there is a rest, and what is in flight takes memory. Buckets are not made smaller than a message that is worth sending for that.
BUCKETS_AT_LEAST = 8
WORTH_SENDING = 2**20


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(eq=False)
class Slot:
    """The place of one parameter in its bucket."""

    param: nn.Parameter
    index: int
    """Position of the parameter in the original optimizer: its id in checkpoints."""
    name: str
    offset: int = 0
    bucket: "FlatBucket" = None
    layout: Layout = None
    segment: nn.Parameter | None = None
    """The part of ``master`` that is this parameter's; None where this rank's slice does not reach it."""
    strides: tuple[int, ...] = ()
    touched: bool = False
    """Whether ``local`` holds a gradient of this parameter."""
    used: bool = False
    """Whether this rank met a gradient of this parameter since the last step."""
    seen: bool = False
    """Whether the running backward has brought a gradient of this parameter."""

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's elements of a ``(size,)`` tensor, in its own shape and strides."""
        return flat.as_strided(self.param.shape, self.strides, flat.storage_offset() + self.offset)

    @property
    def stop(self) -> int:
        return self.offset + self.layout.numel


@dataclass(eq=False)
class FlatBucket:
    """Parameters laid end to end in one buffer whose slices belong to the ranks of ``group``.

    Args:
        slots: the parameters, in the order they lie in; all of one dtype and device.
        group: ranks that share the slices; None is the world.
        owners: for each slot the rank that gets it whole, or None to cut the buffer in equal slices.
    """

    slots: list[Slot]
    group: object = None
    owners: list[int] | None = None
    flat: Tensor = None
    bounds: list[int] = None
    master: Tensor | None = None
    local: Tensor | None = None
    reduced: Tensor | None = None
    base: Tensor | None = None
    """Stage 1: the part of ``reduced`` that ``local`` no longer holds."""
    dirty: bool = False
    """Whether ``local`` holds something that was not sent."""
    pending: int = 0
    """Parameters whose gradient the running backward still owes."""

    def __post_init__(self) -> None:
        first = self.slots[0].param
        self.dtype, self.device = first.dtype, first.device
        self.world, self.rank = comm.world_size(self.group), comm.rank(self.group)
        self._place()
        self.flat = torch.zeros(self.bounds[-1], dtype=self.dtype, device=self.device)
        for slot in self.slots:
            slot.bucket = self
            view = slot.view(self.flat)
            view.copy_(slot.param.data)
            slot.param.data = view

    def _place(self) -> None:
        """Give every slot its offset and layout, and every rank its slice."""
        align = ALIGN_BYTES // self.dtype.itemsize
        if self.owners is not None:
            self.slots = [slot for _, slot in sorted(zip(self.owners, self.slots), key=lambda pair: pair[0])]
            owners = sorted(self.owners)
        end, self.bounds = 0, [0]
        for i, slot in enumerate(self.slots):
            while self.owners is not None and len(self.bounds) <= owners[i]:
                self.bounds.append(end)
            slot.offset = end
            end = round_up(end + slot.param.numel(), align)
        if self.owners is None:
            piece = round_up(-(-end // self.world), align)
            self.bounds = [rank * piece for rank in range(self.world + 1)]
        else:
            self.bounds += [end] * (self.world + 1 - len(self.bounds))
        for slot in self.slots:
            self._describe(slot)

    def _describe(self, slot: Slot) -> None:
        data, order = slot.param.data, None
        try:
            order = memory_order(data)
            slot.strides = data.stride()
        except LayoutError:  # an expanded or overlapping tensor gets a place of its own, row-major
            slot.strides = torch.empty(data.shape, device="meta").stride()
        begin, stop = slot.offset, slot.offset + data.numel()
        cut = [(max(low, begin), min(high, stop)) for low, high in zip(self.bounds, self.bounds[1:])]
        intervals = tuple((low - begin, high - begin) if low < high else (0, 0) for low, high in cut)
        slot.layout = Layout(slot.name, data.shape, intervals, order=order)

    @property
    def mine(self) -> Tensor:
        """This rank's slice of ``flat``."""
        return self.flat[self.bounds[self.rank] : self.bounds[self.rank + 1]]

    @property
    def padding(self) -> int:
        """Elements of ``flat`` that belong to no parameter."""
        return self.bounds[-1] - sum(slot.layout.numel for slot in self.slots)

    def make_master(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create ``master`` and its segments; ``master`` is ``flat``'s own slice where dtype and device are the same."""
        own = self.mine
        self.own_master = own.dtype != dtype or own.device != device
        self.master = own.to(dtype=dtype, device=device, copy=True) if self.own_master else own
        for slot in self.slots:
            if slot.layout.intervals[self.rank][0] < slot.layout.intervals[self.rank][1]:
                slot.segment = nn.Parameter(self.segment_of(slot, self.master).detach())

    def segment_of(self, slot: Slot, piece: Tensor) -> Tensor:
        """``slot``'s elements of a ``(slice,)`` tensor: flat, or in the parameter's shape where one rank owns it whole."""
        start, stop = slot.layout.intervals[self.rank]
        begin = slot.offset + start - self.bounds[self.rank]
        if self.owners is None:
            return piece[begin : begin + stop - start]
        return piece.as_strided(slot.param.shape, slot.strides, piece.storage_offset() + begin)

    def pull_master(self) -> None:
        """Refresh ``master`` from the working weights (after these were loaded anew).

        A master that rounds to its weight stays: it is the better one, as when the optimizer was loaded before the model.
        """
        if self.own_master:
            weights = self.mine.to(self.master.device)
            torch.where(self.master.to(self.dtype) == weights, self.master, weights.to(self.master.dtype), out=self.master)

    def publish(self, async_op: bool = False) -> "comm.Work":
        """Send ``master`` to every rank's ``flat``: cast into this rank's slice, then all-gather in place."""
        if self.own_master:
            self.mine.copy_(self.master)
        return comm.all_gather_into(self.flat, self.bounds, group=self.group, async_op=async_op)

    def add_gradient(self, slot: Slot, grad: Tensor) -> None:
        """Copy the first, add every further gradient of ``slot`` into ``local``."""
        view = slot.view(self.local)
        if slot.touched:
            view.add_(grad)
        else:
            view.copy_(grad)
            slot.touched = True

    def zero_untouched(self) -> None:
        """Before a reduction: padding, and parameters that got no gradient here, count as zero."""
        end = 0
        for slot in self.slots:
            if end < slot.offset:
                self.local[end : slot.offset].zero_()
            if not slot.touched:
                slot.view(self.local).zero_()
            end = slot.stop
        self.local[end:].zero_()

    def forget_local(self) -> None:
        """Nothing is left in ``local`` that a reduction would have to send."""
        for slot in self.slots:
            slot.touched = False

    def check_identity(self) -> None:
        """Raise by name where a parameter no longer is a view into this bucket."""
        storage = self.flat.untyped_storage()._cdata
        for slot in self.slots:
            data = slot.param.data
            if data.untyped_storage()._cdata != storage or data.storage_offset() != slot.offset:
                raise LayoutError(
                    f"parameter {slot.name!r} was moved after boost (model.to(), .half(), resizing or assigning .data do this): "
                    "its updates would be lost. Change the model before boost, or load weights with booster.load_model"
                )


def make_buckets(slots: list[Slot], group, bucket_elements: int, owners: dict[int, int] | None = None) -> list[FlatBucket]:
    """Pack parameters of equal dtype and device, last ones first, since backward meets them in that order.

    A bucket is closed before it would grow over ``bucket_elements``, or an eighth of the model; a larger parameter gets one of
    its own. ``owners`` maps a slot's index to the rank that gets it whole; without it buffers are cut in equal slices.
    """
    total = sum(slot.param.numel() for slot in slots)
    bucket_elements = min(bucket_elements, max(WORTH_SENDING, -(-total // BUCKETS_AT_LEAST)))
    filling: dict[tuple, list[Slot]] = {}
    packed: list[list[Slot]] = []
    for slot in reversed(slots):
        key = (slot.param.dtype, slot.param.device)
        current = filling.get(key)
        if current and sum(s.param.numel() for s in current) + slot.param.numel() > bucket_elements:
            current = None
        if current is None:
            current = filling[key] = []
            packed.append(current)
        current.append(slot)
    return [FlatBucket(some, group, owners and [owners[slot.index] for slot in some]) for some in packed]


def balanced_owners(slots: list[Slot], world: int) -> dict[int, int]:
    """An owner rank for each whole tensor, largest first to the rank that has least so far: {slot index: rank}."""
    load, owner = [0] * world, {}
    for slot in sorted(slots, key=lambda slot: (-slot.param.numel(), slot.index)):
        rank = min(range(world), key=load.__getitem__)
        owner[slot.index] = rank
        load[rank] += slot.param.numel()
    return owner
