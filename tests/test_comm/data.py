"""Tensors that every process can make for every rank, so that a result is compared with one process's."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def make(rank: int, shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What ``rank`` holds: normal numbers, or small integers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    high = 2 if dtype == torch.bool else 20
    return torch.randint(0, high, tuple(shape) if isinstance(shape, (tuple, list)) else (shape,), generator=generator).to(dtype)


def stack(world_size: int, shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What all ranks hold, (N, *shape)."""
    return torch.stack([make(rank, shape, dtype, seed) for rank in range(world_size)])


def rounded_sum(pieces: torch.Tensor, op: str = "sum", dtype=None) -> torch.Tensor:
    """(N, ...) -> (...): the sum or mean in rank order, in float32 for 16 bits, rounded once."""
    wide = torch.float32 if pieces.dtype in (torch.bfloat16, torch.float16) else pieces.dtype
    total = torch.zeros(pieces.shape[1:], dtype=wide)
    for piece in pieces:
        total = total + piece.to(wide)
    if op == "mean":
        total = total / len(pieces)
    return total.to(dtype or pieces.dtype)
