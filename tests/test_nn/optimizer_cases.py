"""Parameters, gradients and a training loop shared by the optimizer tests."""

import torch
from torch import nn

SHAPES = [(7, 5), (33,), (), (0, 3), (4, 3, 2, 2), (130,)]


def tensors(seed, dtype=torch.float32, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (SHAPES if shapes is None else shapes)]


def parameters(dtype=torch.float32, layout="rows"):
    values = tensors(0, dtype)
    if layout == "channels_last":
        values[4] = values[4].contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        values[1] = torch.randn(66, generator=torch.Generator().manual_seed(1)).to(dtype)[::2]
    return [nn.Parameter(v) for v in values]


def give(params, seed, grad_dtype=None, scale=1.0, missing=()):
    """Gradients for step ``seed``, the same numbers for every list of parameters; those at ``missing`` get none."""
    for i, (p, g) in enumerate(zip(params, tensors(seed + 100, shapes=[p.shape for p in params]), strict=True)):
        g = (g * scale).to(grad_dtype or p.dtype)
        if g.dtype != p.dtype:
            p.grad_dtype = None
        p.grad = None if i in missing else g


def worst(params, others):
    """Largest error relative to its tensor's largest element; a tensor that ended near 0 counts as 0.1."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(params, others, strict=True) if a.numel()]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=0.1)).item() for a, b in pairs)
