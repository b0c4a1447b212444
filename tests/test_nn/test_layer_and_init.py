"""Layers, initialisers and what colossalai.nn exports."""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import colossalai.nn as col_nn
from colossalai.nn import init
from colossalai.nn.layer import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    MixedFusedLayerNorm,
    ScaledMaskedSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    divide,
)

pytestmark = pytest.mark.fast


def test_c2_optimizers_import_without_extras():
    code = (
        "import sys, colossalai.nn.optimizer, colossalai.nn, colossalai.amp.naive_amp.mixed_precision_optimizer\n"
        "bad = {'transformers', 'peft', 'ray', 'bitsandbytes', 'galore_torch', 'diffusers'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_exports_and_names_not_built_yet():
    from colossalai.nn import CosineAnnealingWarmupLR, HybridAdam, LinearWarmupLR, kaiming_uniform_  # noqa: F401
    from colossalai.nn.optimizer import CAME, Adafactor, DistributedLamb, cast_to_distributed
    from colossalai.utils.errors import NotBuiltError

    for name in (CAME, Adafactor, DistributedLamb, cast_to_distributed, col_nn.Adafactor):
        with pytest.raises(NotBuiltError, match="not built yet"):
            name([])
    assert not hasattr(col_nn, "nonsense")


def test_divide():
    assert divide(12, 4) == 3
    with pytest.raises(AssertionError, match="12 is not divisible by 5"):
        divide(12, 5)


@pytest.mark.parametrize("weight, given", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
def test_mixed_layer_norm_has_the_weights_dtype(weight, given):
    norm = MixedFusedLayerNorm((3, 8), eps=1e-3, dtype=getattr(torch, weight))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2), norm.bias.uniform_(-1, 1)
    x = torch.randn(4, 3, 8).to(getattr(torch, given)).requires_grad_()
    out = norm(x)
    want = F.layer_norm(x.double(), (3, 8), norm.weight.double(), norm.bias.double(), 1e-3)
    assert out.dtype == norm.weight.dtype
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6 if weight == "float32" else 3e-2)
    out.sum().backward()
    assert x.grad.dtype == x.dtype and set(norm.state_dict()) == {"weight", "bias"}


def reference(x, mask, scale):
    scores = x.double() * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -1e30)
    return torch.softmax(scores, -1) if mask is None else torch.softmax(scores, -1).masked_fill(mask, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_functions_and_their_gradients(dtype):
    x = torch.randn(2, 3, 5, 5, dtype=dtype)
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[0, 0, 2] = True  # a row masked throughout
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    calls = [
        (lambda t: ScaledMaskedSoftmax.apply(t, mask, 0.7), mask),
        (lambda t: ScaledMaskedSoftmax.apply(t, mask.to(torch.uint8), 0.7), mask),
        (lambda t: ScaledMaskedSoftmax.apply(t, None, 0.7), None),
        (lambda t: ScaledUpperTriangMaskedSoftmax.apply(t.reshape(6, 5, 5), 0.7).view(t.shape), causal),
    ]
    weights = torch.randn(x.shape, dtype=torch.float64)
    for call, hidden in calls:
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        found, want = call(a), reference(b, hidden, 0.7)
        (found.double() * weights).sum().backward()
        (want * weights).sum().backward()
        bound = 1e-6 if dtype == torch.float32 else 2e-2
        assert found.dtype == dtype and not found.isnan().any()
        torch.testing.assert_close(found.double(), want, rtol=0, atol=bound)
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", AttnMaskType)
@pytest.mark.parametrize("queries", [6, 2])
@pytest.mark.parametrize("with_mask", [True, False])
def test_fused_scale_mask_softmax_is_the_same_fused_or_not(kind, queries, with_mask):
    x = torch.randn(2, 3, queries, 6, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, queries, 6, dtype=torch.bool)
    mask[:, :, :, 1] = True
    mask = mask if with_mask else None
    hidden = torch.ones(queries, 6, dtype=torch.bool).triu(1 + 6 - queries) if kind is AttnMaskType.causal else None
    if with_mask:
        hidden = mask if hidden is None else mask | hidden

    def fill(scores, m):
        return scores.masked_fill(m, -10000.0)

    for fused in (True, False):
        layer = FusedScaleMaskSoftmax(False, True, kind, fused, fill, True, 0.5)
        torch.testing.assert_close(layer(x, mask).double(), reference(x, hidden, 0.5), rtol=0, atol=1e-2)
    with pytest.raises(AssertionError, match="softmax_in_fp32"):
        FusedScaleMaskSoftmax(False, True, kind, True, fill, False, 0.5)
    with pytest.raises(AssertionError, match="both"):
        FusedScaleMaskSoftmax(True, True, kind, True, fill, True, None)


def filled(initializer, **fans):
    torch.manual_seed(0)
    return initializer(torch.empty(400, 300), **fans)


def test_initialisers_have_their_moments():
    def uniform(bound):
        return bound, bound / math.sqrt(3)

    cases = [
        (init.uniform_(-2, 2), {}, uniform(2)),
        (init.normal_(0, 0.5), {}, (None, 0.5)),
        (init.trunc_normal_(0, 1, -2, 2), {}, (2, 0.8796)),
        (init.kaiming_uniform_(a=math.sqrt(5)), {}, uniform(1 / math.sqrt(300))),
        (init.kaiming_uniform_(mode="fan_out", nonlinearity="relu"), {}, uniform(math.sqrt(6 / 400))),
        (init.kaiming_normal_(nonlinearity="relu"), {"fan_in": 50}, (None, math.sqrt(2 / 50))),
        (init.xavier_uniform_(), {}, uniform(math.sqrt(6 / 700))),
        (init.xavier_uniform_(a=1.0, scale=1.0, gain=2.0), {"fan_in": 100}, uniform(0.2)),
        (init.xavier_normal_(), {"fan_in": 100, "fan_out": 100}, (None, 0.1)),
        (init.lecun_uniform_(), {"fan_in": 75}, uniform(0.2)),
        (init.lecun_normal_(), {"fan_in": 100}, (0.2 / 0.8796, 0.1)),
        (init.zeros_(), {}, (0, 0)),
    ]
    for initializer, fans, (bound, std) in cases:
        x = filled(initializer, **fans)
        assert x.std().item() == pytest.approx(std, rel=0.02) and abs(x.mean().item()) < 0.02 * max(std, 1e-9) + 1e-9
        if bound is not None:
            assert x.abs().max().item() <= bound * (1 + 1e-6) and x.abs().max().item() >= bound * 0.95
    assert torch.equal(filled(init.ones_()), torch.ones(400, 300))


def test_initialisers_check_their_arguments():
    with pytest.raises(ValueError, match="fan_in must be given"):
        init.lecun_normal_()(torch.empty(3))
    with pytest.raises(ValueError, match="mode='x'"):
        init.kaiming_normal_(mode="x")
    assert init.lecun_normal_()(torch.empty(3), fan_in=4).abs().max() < 2.0
