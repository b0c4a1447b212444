"""How a parameter is cut over the ranks: the one description that norms, optimizers and checkpoints read."""

from dataclasses import dataclass

import torch

from colossalai.utils.errors import LayoutError

Interval = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Where the elements of one logical tensor live.

    A tensor is described flat, in the order its elements lie in memory (row-major unless ``order`` says otherwise): rank ``r``
    of the shard group holds the elements ``intervals[r] = (start, stop)``. ``None`` in place of the intervals means that every
    rank holds the whole tensor.
    Empty intervals are legal (a bias of five elements on eight ranks). Intervals of different ranks never overlap and
    together cover ``[0, numel)``.
    """

    name: str
    """Logical name: the in-memory Hugging Face name, ``unwrap().state_dict()``'s key."""
    shape: torch.Size
    """Logical shape, without padding."""
    intervals: tuple[Interval, ...] | None = None
    """Flat interval held by each rank of the shard group, or None where each holds all."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""
    order: tuple[int, ...] | None = None
    """Dims from the slowest to the fastest in memory where that is not row-major (channels_last: ``(0, 2, 3, 1)``)."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def interval(self, rank: int) -> Interval:
        """Flat interval held by ``rank`` of the shard group."""
        return (0, self.numel) if self.intervals is None else self.intervals[rank]

    def flatten(self, full: torch.Tensor) -> torch.Tensor:
        """``full`` (logical shape) as ``(numel,)`` in memory order; a view where ``full`` lies in that order."""
        return (full if self.order is None else full.permute(self.order)).reshape(-1)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`flatten`: ``(numel,)`` in memory order as a view of logical shape."""
        if self.order is None:
            return flat.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse)

    def piece(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The flat piece of ``full`` (logical shape) that ``rank`` holds."""
        start, stop = self.interval(rank)
        return self.flatten(full)[start:stop]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dims of a dense tensor from the slowest to the fastest in memory; None for row-major.

    Raises:
        LayoutError: where the tensor's elements overlap or leave holes.
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim)))
    if not tensor.permute(order).is_contiguous():
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not dense: call .contiguous()"
        )
    return order
