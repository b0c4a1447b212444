"""FusedSGD against torch.optim.SGD."""

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import FusedSGD, flat

from .optimizer_cases import give, parameters, worst

pytestmark = pytest.mark.fast
OPTIONS = [
    dict(),
    dict(weight_decay=0.1),
    dict(momentum=0.9),
    dict(momentum=0.9, dampening=0.3, weight_decay=0.1),
    dict(momentum=0.9, nesterov=True, weight_decay=0.1),
]


@pytest.fixture(params=["fused", "small batches", "plain"])
def path(request, monkeypatch):
    if request.param == "small batches":
        monkeypatch.setitem(flat.BATCH, "cpu", 17)
    if request.param == "plain":
        monkeypatch.setattr(flat, "FUSED_DEVICES", ())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(options, grad_dtype, path):
    ours, theirs = parameters(), parameters()
    mine, reference = FusedSGD(ours, lr=0.1, **options), torch.optim.SGD(theirs, lr=0.1, **options)
    for seed in range(6):
        missing = (0, 4) if seed < 2 else ()
        give(ours, seed, grad_dtype, missing=missing)
        give(theirs, seed, missing=missing)
        for p in theirs:
            p.grad = None if p.grad is None else p.grad.to(grad_dtype).float()
        mine.step()
        reference.step()
    assert worst(ours, theirs) < 1e-6
    keys = {"momentum_buffer"} if "momentum" in options else set()
    assert all(set(state) == keys for state in mine.state.values())


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_after_momentum_is_in_the_update_and_not_in_the_buffer(nesterov, path):
    ours = parameters()
    theirs = [p.detach().clone() for p in ours]
    buffers = [torch.zeros_like(p) for p in theirs]
    mine = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=nesterov, wd_after_momentum=True)
    for seed in range(5):
        give(ours, seed)
        for p, b, source in zip(theirs, buffers, ours, strict=True):
            b.mul_(0.9).add_(source.grad)
            step = source.grad + 0.9 * b if nesterov else b.clone()
            p.sub_(0.1 * (step + 0.2 * p))
        mine.step()
    assert worst(ours, theirs) < 1e-6


def test_arguments_are_checked():
    params = [nn.Parameter(torch.ones(2))]
    for options, words in (
        (dict(), "lr is required"),
        (dict(lr=-1.0), "lr=-1.0"),
        (dict(lr=1.0, momentum=-1), "momentum=-1"),
        (dict(lr=1.0, weight_decay=-1), "weight_decay=-1"),
        (dict(lr=1.0, nesterov=True), "nesterov"),
        (dict(lr=1.0, nesterov=True, momentum=0.9, dampening=0.1), "nesterov"),
    ):
        with pytest.raises(ValueError, match=words):
            FusedSGD(params, **options)
