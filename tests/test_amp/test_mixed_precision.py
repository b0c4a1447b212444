"""MixedPrecisionOptimizer against fp32 masters by hand, its skipped steps on two ranks, and what users read from it."""

import copy

import pytest
import torch
from torch import nn

from colossalai import comm
from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import MAX_SKIPPED_AT_FLOOR
from colossalai.amp.naive_amp.mixed_precision_mixin import BF16MixedPrecisionMixin
from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer
from colossalai.amp.naive_amp.watch import NonFiniteWatch
from colossalai.interface import TokenWeight
from colossalai.nn.optimizer import FusedSGD, HybridAdam, Lamb
from colossalai.utils.errors import GradientOverflowError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {
    "HybridAdam": lambda ps: HybridAdam(ps, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, eps=1e-8),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "FusedSGD": lambda ps: FusedSGD(ps, lr=0.1, momentum=0.9),
    "Lamb": lambda ps: Lamb(ps, lr=1e-2, weight_decay=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.125),
}


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    # Not .to(dtype): it swaps tensors under fake mode, which fails.
    first, second, third = (nn.Linear(*sizes, dtype=dtype) for sizes in ((6, 16), (16, 5), (5, 3)))
    model = nn.Sequential(first, nn.ReLU(), second, third)
    model[2].bias.requires_grad_(False)
    return model


def batch(step, dtype, rank=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def by_hand(precision, make, steps, max_norm, accumulate):
    """16-bit weights cast each step from fp32 masters, gradients of the 16-bit model, without any loss scale in
    fp32."""
    dtype = DTYPES[precision]
    model = mlp(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in trained]
    optim = make([nn.Parameter(m) for m in masters])
    masters = optim.param_groups[0]["params"]
    norms = []
    for step in range(steps):
        for k in range(accumulate):
            (model(batch(step * accumulate + k, dtype)).float().square().mean() * 2.0**10).backward()
        for p, m in zip(trained, masters, strict=True):
            m.grad = p.grad.float() / 2.0**10
            p.grad = None
        norms.append(torch.stack([m.grad.norm() for m in masters]).norm().item())
        if max_norm:
            nn.utils.clip_grad_norm_(masters, max_norm)
        optim.step()
        with torch.no_grad():
            for p, m in zip(trained, masters, strict=True):
                p.copy_(m)
    return model, masters, norms


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm, accumulate", [(0.0, 1), (0.05, 1), (0.05, 3)])
def test_equals_fp32_masters_by_hand(precision, name, max_norm, accumulate):
    dtype = DTYPES[precision]
    reference, masters, norms = by_hand(precision, OPTIMIZERS[name], 4, max_norm, accumulate)
    model = mlp(dtype)
    optim = MixedPrecisionOptimizer(OPTIMIZERS[name](model.parameters()), precision, initial_scale=2.0**10, max_norm=max_norm)
    assert optim.get_grad_norm() is None
    for step in range(4):
        for k in range(accumulate):
            optim.backward(model(batch(step * accumulate + k, dtype)).float().square().mean())
        optim.step()
        assert optim.get_grad_norm() == pytest.approx(norms[step], rel=2e-3)
        assert all(p.grad is None for p in model.parameters()) and all(m.grad is None for m in optim.parameters)
    # the loss scale is a power of two, so gradients are the same to rounding; bf16 has none here and 2**10 in the
    # reference
    for a, b in zip(optim.parameters, masters, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=2e-5, atol=2e-5)
        assert a.dtype == torch.float32
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
        assert a.dtype == dtype


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
def test_c14_get_param_grad_is_unscaled_and_c26_state_moves_to_the_masters(precision):
    dtype = DTYPES[precision]
    model, twin = mlp(dtype), mlp(dtype)
    inner = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.125)
    groups = inner.param_groups[0]
    optim = MixedPrecisionOptimizer(inner, precision, initial_scale=2.0**10)
    assert inner.param_groups[0] is groups and len(groups["params"]) == 5  # the frozen one is gone
    assert all(inner.state[m]["sum"].dtype == torch.float32 for m in groups["params"])
    optim.backward(model(batch(0, dtype)).float().square().mean())
    twin(batch(0, dtype)).float().square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        found = optim.get_param_grad(p)
        if q.grad is None:
            assert found is None
        else:
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, q.grad.float(), rtol=3e-3, atol=1e-4)
    optim.step()
    assert optim.get_param_grad(model[0].weight) is None


class Labelled(nn.Module):
    """Cross entropy over the labels that are not -100."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 4, dtype=dtype)

    def forward(self, x, labels=None):
        return nn.functional.cross_entropy(self.head(x).float(), labels)


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_token_weights_give_the_gradient_over_all_labels(precision, max_norm):
    dtype = DTYPES[precision]
    xs, labels = batch(0, dtype), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    labels[1:4] = -100
    whole, parts = Labelled(dtype), Labelled(dtype)
    one, many = (
        MixedPrecisionOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), precision, 2.0**10, max_norm=max_norm)
        for m in (whole, parts)
    )
    many.token_weight = TokenWeight(parts, parts)
    one.backward(whole(xs, labels=labels))
    for half in (slice(0, 4), slice(4, 8)):
        many.backward(parts(xs[half], labels=labels[half]) / 2)
    bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(many.get_param_grad(parts.head.weight), one.get_param_grad(whole.head.weight), **bound)
    one.step()
    many.step()
    assert many.get_grad_norm() == pytest.approx(one.get_grad_norm(), rel=1e-2)
    torch.testing.assert_close(many.parameters[0], one.parameters[0], **bound)


@pytest.mark.fast
def test_maps_names_groups_and_reloaded_weights():
    model = mlp(torch.bfloat16)
    optim = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters()), "bf16")
    weight = model[0].weight
    master = optim.get_working_to_master_map()[id(weight)]
    assert optim.get_master_to_working_map()[id(master)] is weight and optim.working_to_master_map[weight] is master
    assert optim.named_working()[0][0] == "0.weight, shape (16, 6)" and len(optim.param_groups[0]["param_names"]) == 5
    with torch.no_grad():
        weight.fill_(2.0)
    optim.update_master_params(model)
    assert torch.equal(master, torch.full_like(master, 2.0))
    more = nn.Linear(2, 2, dtype=torch.bfloat16)
    optim.add_param_group({"params": list(more.named_parameters()), "lr": 0.5})
    assert optim.working_to_master_map[more.bias].dtype == torch.float32 and optim.param_groups[1]["lr"] == 0.5
    fp32 = nn.Linear(2, 2)
    own = MixedPrecisionOptimizer(torch.optim.AdamW(fp32.parameters()), "bf16")
    assert own.working_to_master_map[fp32.weight] is fp32.weight


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
def test_clip_before_the_step_is_in_unscaled_units(precision):
    dtype = DTYPES[precision]
    model = mlp(dtype)
    optim = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), precision, initial_scale=2.0**8)
    optim.backward(model(batch(0, dtype)).float().square().mean())
    before = torch.stack([optim.get_param_grad(p).norm() for p in optim.working_to_master_map]).norm()
    norm = optim.clip_grad_by_norm(0.01)
    torch.testing.assert_close(norm, before, rtol=1e-3, atol=0)
    after = torch.stack([optim.get_param_grad(p).norm() for p in optim.working_to_master_map]).norm()
    assert after.item() == pytest.approx(0.01, rel=1e-2)
    optim.clip_grad_by_value(0.001)
    assert max(optim.get_param_grad(p).abs().max().item() for p in optim.working_to_master_map) <= 0.001 * 1.01
    optim.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
def test_resume_is_bitwise(precision):
    dtype = DTYPES[precision]

    def go(model, optim, steps):
        for step in steps:
            optim.backward(model(batch(step, dtype)).float().square().mean() * (1e6 if step == 1 else 1.0))
            optim.step()

    def make():
        model = mlp(dtype)
        return model, MixedPrecisionOptimizer(HybridAdam(model.parameters(), lr=1e-2), precision, hysteresis=1)

    model, optim = make()
    go(model, optim, range(3))
    other, again = make()
    again.load_state_dict(copy.deepcopy(optim.state_dict()))
    other[2].bias.data.copy_(model[2].bias)  # frozen: the model's, not the optimizer's
    go(model, optim, range(3, 6))
    go(other, again, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optim.parameters, again.parameters, strict=True))
    if precision == "fp16":
        assert again.grad_scaler.state_dict() == optim.grad_scaler.state_dict() and again.grad_scaler.skipped_steps == 1


@pytest.mark.fast
def test_hybrid_adam_gets_the_narrow_gradients_themselves():
    model = mlp(torch.bfloat16)
    seen = []

    class Spy(HybridAdam):
        def step(self, closure=None, div_scale=-1):
            seen.extend((p.grad.dtype, p.dtype) for g in self.param_groups for p in g["params"])
            return super().step(closure, div_scale)

    optim = MixedPrecisionOptimizer(Spy(model.parameters()), "bf16", max_norm=0.1)
    optim.backward(model(batch(0, torch.bfloat16)).float().square().mean())
    optim.step()
    wanted = torch.bfloat16 if hasattr(torch.Tensor, "grad_dtype") else torch.float32
    assert set(seen) == {(wanted, torch.float32)} and len(seen) == 5


@pytest.mark.fast
def test_arguments_are_checked():
    model = mlp(torch.bfloat16)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="precision='fp8'"):
        MixedPrecisionOptimizer(optim, "fp8")
    with pytest.raises(ValueError, match="max_norm"):
        MixedPrecisionOptimizer(optim, "bf16", max_norm=-1)
    wrapped = MixedPrecisionOptimizer(optim, "bf16")
    with pytest.raises(ValueError, match="closure"):
        wrapped.step(lambda: None)
    with pytest.raises(ValueError, match="get_param_grad"):
        wrapped.unscale_grad()
    with pytest.raises(ValueError, match="norm_type=1"):
        wrapped.get_grad_norm(1)


@pytest.mark.fast
def test_a_step_in_the_fake_world():
    with comm.fake_world(0, 2):
        for precision, dtype in DTYPES.items():
            model = mlp(dtype)
            optim = MixedPrecisionOptimizer(HybridAdam(model.parameters()), precision, max_norm=0.1)
            with comm.record() as ledger:
                optim.backward(model(torch.randn(8, 6, dtype=dtype)).float().square().mean())
                optim.step()
                assert optim.get_grad_norm() == 1.0
            assert ledger.calls() == (1 if precision == "fp16" else 0)


@pytest.mark.fast
def test_c28_bf16_nan_loss_warns_once(monkeypatch):
    told = []
    logger = type("Logger", (), {"warning": lambda self, message, ranks=None: told.append(message)})()
    monkeypatch.setattr("colossalai.amp.naive_amp.watch.get_dist_logger", lambda: logger)
    mixin = BF16MixedPrecisionMixin()
    for loss in (1.0, float("nan"), 2.0, float("inf")):
        assert mixin.pre_backward(torch.tensor(loss, dtype=torch.bfloat16)).shape == ()
        assert not mixin.should_skip_step()
    assert mixin.nonfinite_losses == 2 and len(told) == 1 and "the loss on rank 0 is not finite" in told[0]
    watch = NonFiniteWatch()
    watch.push("a", torch.tensor(float("nan"))), watch.push("b", torch.tensor(float("nan")))
    assert len(told) == 3


def fp16_run(rank, world_size, poisoned, steps):
    """Steps of one model a rank (not synchronised but in the decision); rank 1's gradients are inf in the poisoned
    steps."""
    model = mlp(torch.float16)
    optim = MixedPrecisionOptimizer(HybridAdam(model.named_parameters(), lr=1e-2), "fp16")
    trace, error, start = [], None, copy.deepcopy(model.state_dict())
    for step in range(steps):
        optim.backward(model(batch(step, torch.float16, rank)).square().mean())
        if rank == 1 and step in poisoned:
            model[0].weight.grad[0, 0] = float("inf")
        before = model[0].weight.detach().clone()
        try:
            with comm.record() as ledger:
                optim.step()
        except GradientOverflowError as e:
            error = str(e)
            break
        changed = not torch.equal(before, model[0].weight)
        trace.append((changed, optim.grad_scaler.value, optim.grad_scaler.skipped_steps, ledger.calls()))
    return trace, error, any(not torch.equal(v, start[k]) for k, v in model.state_dict().items())


def test_c28_fp16_defaults_skip_at_most_two_steps(workers):
    for trace, error, _ in workers(2).run(fp16_run, poisoned=[], steps=20):
        assert error is None and trace[-1][2] <= 2 and any(changed for changed, *_ in trace[:3])
        assert {calls for *_, calls in trace} == {1}


def test_c28_both_ranks_skip_the_same_steps(workers):
    first, second = workers(2).run(fp16_run, poisoned=[10, 11, 12], steps=20)
    assert first[0] == second[0]
    trace = first[0]
    already = trace[9][2]
    assert [changed for changed, *_ in trace[10:14]] == [False, False, False, True]
    assert trace[12][2] == already + 3
    halvings = {0: 2, 1: 3, 2: 3}[already]  # the first `hysteresis` - 1 overflows are forgiven
    assert trace[12][1] == trace[9][1] / 2**halvings


@pytest.mark.limit(120)
def test_c28_endless_overflow_is_an_error_that_names_rank_and_parameter(workers):
    first, second = workers(2).run(fp16_run, poisoned=list(range(5, 200)), steps=200)
    for _trace, error, _ in (first, second):
        assert f"{MAX_SKIPPED_AT_FLOOR} steps in a row" in error and "last on rank 1" in error and "min_scale=1" in error
    assert "here (rank 1) in 0.weight, shape (16, 6)" in second[1]
    assert "in no parameter of this rank" in first[1]
    assert len(first[0]) == len(second[0]) < 5 + 2 + 16 + MAX_SKIPPED_AT_FLOOR
