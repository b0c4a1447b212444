"""Softmax over attention scores with scale and mask, in float32, which keeps only its result for backward."""

import enum
from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossalai.utils.errors import ConfigError


class AttnMaskType(enum.Enum):
    """Which scores count: those of real keys, those of earlier keys, or both."""

    padding = 1
    causal = 2
    paddedcausal = 3


def _future(scores: Tensor) -> Tensor:
    """(queries, keys), True at keys later than the query. The last query goes with the last key, as with a cache."""
    queries, keys = scores.shape[-2:]
    if keys < queries:
        raise ConfigError(f"causal attention of {queries} queries to {keys} keys: there must be a key for each query")
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)


def _softmax(scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Softmax of float32 ``scores`` over the last dim; a row that is masked throughout is 0, not NaN."""
    if mask is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    probs = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
    return probs.masked_fill(mask, 0.0).to(dtype)


def _softmax_backward(grad: Tensor, probs: Tensor, scale: float) -> Tensor:
    grad, probs = grad.float(), probs.float()
    return probs * (grad - (grad * probs).sum(dim=-1, keepdim=True)) * scale


class ScaledUpperTriangMaskedSoftmax(torch.autograd.Function):
    """``apply(inputs, scale)``: causal softmax of ``scale * inputs``, (batches, S_q, S_k) to the same."""

    @staticmethod
    def forward(ctx, inputs: Tensor, scale: float) -> Tensor:
        probs = _softmax(inputs.float() * scale, _future(inputs), inputs.dtype)
        ctx.scale = scale
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx, grad: Tensor):
        (probs,) = ctx.saved_tensors
        return _softmax_backward(grad, probs, ctx.scale).to(probs.dtype), None


class ScaledMaskedSoftmax(torch.autograd.Function):
    """``apply(inputs, mask, scale)``: softmax of ``scale * inputs``, (B, H, S_q, S_k), where ``mask`` is 0."""

    @staticmethod
    def forward(ctx, inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        probs = _softmax(inputs.float() * scale, None if mask is None else mask.bool(), inputs.dtype)
        ctx.scale = scale
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx, grad: Tensor):
        (probs,) = ctx.saved_tensors
        return _softmax_backward(grad, probs, ctx.scale).to(probs.dtype), None, None


class FusedScaleMaskSoftmax(nn.Module):
    """Scale, mask and softmax of attention scores.

    Args:
        input_in_fp16, input_in_bf16: dtype of the scores; the result has the same one.
        attn_mask_type: causal scores are masked here, also if ``mask`` is None; for the others ``mask`` says it all.
        scaled_masked_softmax_fusion: use this file's functions for 16-bit scores, which save memory; else plain torch
            calls, with ``mask_func``.
        mask_func: ``(scores, mask) -> scores`` with what is masked made very negative; used without the fusion.
        softmax_in_fp32: compute in float32 whatever comes in.
        scale: factor of the scores; None for 1.

    Raises:
        ConfigError: for both 16-bit inputs at once, or a scale without ``softmax_in_fp32``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ConfigError("input_in_fp16 and input_in_bf16 cannot both be set: scores have one dtype")
        if scale is not None and not softmax_in_fp32:
            raise ConfigError(f"scale={scale!r} needs softmax_in_fp32=True: scaled scores may overflow in 16 bits")
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func, self.softmax_in_fp32, self.scale = mask_func, softmax_in_fp32, scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Probabilities of scores ``input`` (B, H, S_q, S_k); ``mask`` broadcasts to it and is nonzero where masked."""
        if input.dim() != 4:
            raise ConfigError(f"input of shape {tuple(input.shape)} must be (batch, heads, queries, keys)")
        if self.scaled_masked_softmax_fusion and self.input_in_float16:
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        scale = 1.0 if self.scale is None else self.scale
        if self.attn_mask_type is AttnMaskType.causal and mask is None:
            batch, heads, queries, keys = input.shape
            probs = ScaledUpperTriangMaskedSoftmax.apply(input.reshape(-1, queries, keys), scale)
            return probs.view(batch, heads, queries, keys)
        return ScaledMaskedSoftmax.apply(input, self._with_future(input, mask), scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        mask = self._with_future(input, mask)
        if mask is not None:
            scores = self.mask_func(scores, mask)
        return torch.softmax(scores, dim=-1).to(input.dtype)

    def _with_future(self, input: Tensor, mask: Tensor | None) -> Tensor | None:
        """``mask``, under ``causal`` with later keys added to it."""
        if self.attn_mask_type is not AttnMaskType.causal:
            return mask
        future = _future(input)
        return future if mask is None else mask.bool() | future
