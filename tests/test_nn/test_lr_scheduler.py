"""Learning-rate schedules against their formulas, torch's schedulers and themselves after a resume."""

import io
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from colossalai.interface import OptimizerWrapper
from colossalai.nn import lr_scheduler as ours
from colossalai.nn.lr_scheduler.delayed import (
    DelayerScheduler,
    TwoStageScheduler,
    WarmupDelayerScheduler,
    WarmupScheduler,
)
from colossalai.utils.errors import ConfigError

pytestmark = pytest.mark.fast
TOTAL = 20


def optimizer(*lrs, cls=torch.optim.SGD, **options):
    return cls([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0, 0.25)], lr=1.0, **options)


def rates(optim):
    return [float(group["lr"]) for group in optim.param_groups]


def run(optim, scheduler, steps=TOTAL + 1, first=0):
    """Learning rates of all groups at steps ``first`` to ``steps - 1``."""
    found = [rates(optim)]
    for _ in range(first + 1, steps):
        optim.step()
        scheduler.step()
        found.append(rates(optim))
    return found


def halving(t):
    return 0.5 ** (t / 3)


def wavy(t):
    return 1.0 + 0.1 * math.sin(t)


def cosine(t, total, low):
    return lambda base: low + (base - low) * (1 + math.cos(math.pi * t / total)) / 2


def warm(t, steps, after):
    return (lambda base: base * (t + 1) / steps) if t < steps else after(t - steps)


# name -> (constructor, rule: step -> (initial lr -> lr))
CASES = {
    "CosineAnnealingLR": (
        lambda o, **k: ours.CosineAnnealingLR(o, TOTAL, eta_min=0.1, **k),
        lambda t: cosine(t, TOTAL, 0.1),
    ),
    "CosineAnnealingWarmupLR": (
        lambda o, **k: ours.CosineAnnealingWarmupLR(o, TOTAL, 3, 0.1, **k),
        lambda t: warm(t, 3, lambda s: cosine(s, TOTAL - 3, 0.1)),
    ),
    "CosineAnnealingWarmupLR without warmup": (
        lambda o, **k: ours.CosineAnnealingWarmupLR(o, TOTAL, **k),
        lambda t: cosine(t, TOTAL, 0.0),
    ),
    "FlatAnnealingLR": (
        lambda o, **k: ours.FlatAnnealingLR(o, TOTAL, **k),
        lambda t: (lambda base: base) if t < 14 else cosine(t - 14, 6, 0.0),
    ),
    "FlatAnnealingWarmupLR": (
        lambda o, **k: ours.FlatAnnealingWarmupLR(o, TOTAL, 4, 0.5, 0.1, **k),
        lambda t: warm(t, 4, lambda s: (lambda base: base) if s < 8 else cosine(s - 8, 8, 0.1)),
    ),
    "LinearWarmupLR": (
        lambda o, **k: ours.LinearWarmupLR(o, TOTAL, 4, **k),
        lambda t: lambda base: base * ((t + 1) / 5 if t < 4 else (TOTAL - t) / 16),
    ),
    "MultiStepLR": (
        lambda o, **k: ours.MultiStepLR(o, TOTAL, [5, 12, 12], 0.5, **k),
        lambda t: lambda base: base * 0.5 ** ((t >= 5) + 2 * (t >= 12)),
    ),
    "MultiStepWarmupLR": (
        lambda o, **k: ours.MultiStepWarmupLR(o, TOTAL, 4, [2, 7, 12], 0.5, **k),
        lambda t: lambda base: base * ((t + 1) / 4 if t < 4 else 0.5 ** ((t >= 7) + (t >= 12))),
    ),
    "PolynomialLR": (
        lambda o, **k: ours.PolynomialLR(o, 15, 0.1, 2.0, **k),
        lambda t: lambda base: (base - 0.1) * (1 - min(t, 15) / 15) ** 2 + 0.1,
    ),
    "PolynomialWarmupLR": (
        lambda o, **k: ours.PolynomialWarmupLR(o, TOTAL, 5, 0.1, 2.0, **k),
        lambda t: warm(t, 5, lambda s: lambda base: (base - 0.1) * (1 - s / 15) ** 2 + 0.1),
    ),
    "StepLR": (lambda o, **k: ours.StepLR(o, TOTAL, 4, 0.5, **k), lambda t: lambda base: base * 0.5 ** (t // 4)),
    "ExponentialLR": (lambda o, **k: ours.ExponentialLR(o, TOTAL, 0.9, **k), lambda t: lambda base: base * 0.9**t),
    "LambdaLR": (lambda o, **k: ours.LambdaLR(o, TOTAL, halving, **k), lambda t: lambda base: base * halving(t)),
    "MultiplicativeLR": (
        lambda o, **k: ours.MultiplicativeLR(o, TOTAL, wavy, **k),
        lambda t: lambda base: base * math.prod(wavy(s) for s in range(1, t + 1)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_follows_its_rule_for_every_group(name):
    make, rule = CASES[name]
    optim = optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(optim, make(optim))
    want = [[rule(t)(base) for base in (1.0, 0.25)] for t in range(TOTAL + 1)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", list(CASES) + ["OneCycleLR"])
def test_resumes_at_every_step_from_a_file(name):
    make = CASES[name][0] if name in CASES else lambda o, **k: ours.OneCycleLR(o, TOTAL, **k)
    options = {} if name in CASES else {"momentum": 0.9}
    reference = optimizer(**options)
    whole = run(reference, make(reference))
    for stop in range(TOTAL):
        optim = optimizer(**options)
        scheduler = make(optim)
        run(optim, scheduler, stop + 1)
        file = io.BytesIO()
        torch.save({"scheduler": scheduler.state_dict(), "optimizer": optim.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for order in (("optimizer", "scheduler"), ("scheduler", "optimizer"), ("scheduler",)):
            fresh = optimizer(**options)
            again = make(fresh)
            for part in order:
                (fresh if part == "optimizer" else again).load_state_dict(saved[part])
            assert run(fresh, again, first=stop) == whole[stop:], (stop, order)
            assert again.get_last_lr() == rates(fresh)
        fresh = optimizer(**options)
        fresh.load_state_dict(saved["optimizer"])
        if stop > 0:  # torch's other way to resume: the optimizer's groups and the last step
            assert run(fresh, make(fresh, last_epoch=stop - 1), first=stop) == whole[stop:]


@pytest.mark.parametrize("name", CASES)
def test_rates_depend_on_the_step_alone(name):
    """Reading, jumping back and meddling with the groups in between change nothing."""
    optim = optimizer()
    scheduler = CASES[name][0](optim)
    whole = run(optim, scheduler)
    assert [scheduler.lrs_at(t) for t in range(TOTAL + 1)] == whole
    for t in (7, 3, TOTAL, 0):
        scheduler.step(t)
        assert rates(optim) == whole[t] == scheduler.get_lr() == scheduler.get_lr() == scheduler.get_last_lr()
        optim.param_groups[0]["lr"] = 17.0
    scheduler.step()
    assert rates(optim) == whole[1]


def test_reference_table_of_the_warmup_rule():
    """base 1, total 10, warmup 3, eta_min 0.1; the recursive form peaks at 1.0469 under torch 2.6 and later."""
    optim = optimizer(1.0)
    found = [lr for (lr,) in run(optim, ours.CosineAnnealingWarmupLR(optim, 10, 3, 0.1), 11)]
    want = [0.3333, 0.6667, 1, 1, 0.9554, 0.8306, 0.6501, 0.4499, 0.2694, 0.1446, 0.1]
    assert [round(lr, 4) for lr in found] == want
    assert found[2] == found[3] == 1.0 and max(found) == 1.0


TORCH = {
    "CosineAnnealingLR": (
        lambda o: ours.CosineAnnealingLR(o, TOTAL, 0.1),
        lambda o: torch_schedulers.CosineAnnealingLR(o, TOTAL, 0.1),
    ),
    "MultiStepLR": (
        lambda o: ours.MultiStepLR(o, TOTAL, [3, 3, 9], 0.3),
        lambda o: torch_schedulers.MultiStepLR(o, [3, 3, 9], 0.3),
    ),
    "StepLR": (lambda o: ours.StepLR(o, TOTAL, 3, 0.3), lambda o: torch_schedulers.StepLR(o, 3, 0.3)),
    "ExponentialLR": (lambda o: ours.ExponentialLR(o, TOTAL, 0.9), lambda o: torch_schedulers.ExponentialLR(o, 0.9)),
    "LambdaLR": (
        lambda o: ours.LambdaLR(o, TOTAL, [halving, wavy]),
        lambda o: torch_schedulers.LambdaLR(o, [halving, wavy]),
    ),
    "MultiplicativeLR": (
        lambda o: ours.MultiplicativeLR(o, TOTAL, wavy),
        lambda o: torch_schedulers.MultiplicativeLR(o, wavy),
    ),
    "PolynomialLR": (lambda o: ours.PolynomialLR(o, 15, 0.0, 2.0), lambda o: torch_schedulers.PolynomialLR(o, 15, 2.0)),
}


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name):
    mine, theirs = optimizer(), optimizer()
    make, reference = TORCH[name]
    found, want = run(mine, make(mine)), run(theirs, reference(theirs))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"pct_start": 0.5, "anneal_strategy": "linear"}, {"cycle_momentum": False}], ids=str)
@pytest.mark.parametrize("cls, extra", [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
def test_one_cycle_equals_torch_momentum_included(options, cls, extra):
    mine, theirs = optimizer(cls=cls, **extra), optimizer(cls=cls, **extra)
    one = ours.OneCycleLR(mine, TOTAL, **options)
    two = torch_schedulers.OneCycleLR(theirs, [1.0, 0.25], total_steps=TOTAL, **options)
    for _ in range(TOTAL):
        for a, b in zip(mine.param_groups, theirs.param_groups, strict=True):
            assert a["lr"] == pytest.approx(b["lr"], rel=1e-12)
            assert a.get("momentum", a.get("betas")) == pytest.approx(b.get("momentum", b.get("betas")), rel=1e-12)
        mine.step(), theirs.step(), one.step(), two.step()
    with pytest.raises(ValueError, match="total_steps=20"):
        one.step()


def test_linear_warmup_stays_at_zero_past_the_end():
    optim = optimizer()
    assert run(optim, ours.LinearWarmupLR(optim, 5, 1), 9)[4:] == [[0.25, 0.0625]] + [[0.0, 0.0]] * 4


@pytest.mark.parametrize("warmup", [5, 8])
def test_a_warmup_as_long_as_the_run_or_longer(warmup):
    for cls in (ours.CosineAnnealingWarmupLR, ours.PolynomialWarmupLR, ours.FlatAnnealingWarmupLR, ours.LinearWarmupLR):
        optim = optimizer(1.0)
        found = run(optim, cls(optim, 5, warmup), 6)
        ramp = warmup + (cls is ours.LinearWarmupLR)
        assert found[:5] == [[(t + 1) / ramp] for t in range(5)]


@pytest.mark.parametrize("name", list(CASES) + ["OneCycleLR"])
def test_c75_works_on_the_raw_optimizer_before_wrapping_and_on_the_wrapper_after(name):
    make = CASES[name][0] if name in CASES else lambda o: ours.OneCycleLR(o, TOTAL, cycle_momentum=False)
    before = optimizer()
    scheduler = make(before)
    wrapped = OptimizerWrapper(before)
    after = OptimizerWrapper(optimizer())
    assert run(wrapped, scheduler) == run(after, make(after))
    assert rates(before) == rates(wrapped) == rates(after.optim)


def test_c75_torch_schedulers_accept_the_wrapper():
    plain, wrapped = optimizer(), OptimizerWrapper(optimizer())
    want = run(plain, torch_schedulers.CosineAnnealingLR(plain, TOTAL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(wrapped, torch_schedulers.CosineAnnealingLR(wrapped, TOTAL)) == want


def test_no_warning_where_the_optimizer_skips_steps():
    """fp16 skips the first steps: torch's check of the order would warn."""
    optim = optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = ours.CosineAnnealingWarmupLR(optim, TOTAL, 3)
        for _ in range(5):
            scheduler.step()


STAGES = {
    "two": (lambda o, a: TwoStageScheduler(o, a), 0, lambda t, base: base),
    "delay": (lambda o, a: DelayerScheduler(o, 4, a), 4, lambda t, base: base),
    "warmup": (lambda o, a: WarmupScheduler(o, 4, a), 4, lambda t, base: base * (t + 1) / 4),
    "both": (lambda o, a: WarmupDelayerScheduler(o, 2, 3, a), 5, lambda t, base: base * min((t + 1) / 2, 1)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "after",
    [
        lambda o: ours.CosineAnnealingLR(o, 9, 0.1),
        lambda o: torch_schedulers.CosineAnnealingLR(o, 9, 0.1),
        lambda o: torch_schedulers.ExponentialLR(o, 0.9),
        lambda o: torch_schedulers.LinearLR(o, 0.5, 1.0, 5),
    ],
    ids=["ours", "torch cosine", "torch exponential", "torch linear"],
)
def test_two_stages_with_any_scheduler_after(stage, after):
    make, first, rule = STAGES[stage]
    alone = optimizer()
    tail = run(alone, after(alone), 12)
    want = [[rule(t, base) for base in (1.0, 0.25)] for t in range(first)] + tail
    optim = optimizer()
    found = run(optim, make(optim, after(optim)), first + 12)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-6, atol=1e-12)
    for stop in range(first + 11):
        optim = optimizer()
        scheduler = make(optim, after(optim))
        run(optim, scheduler, stop + 1)
        fresh = optimizer()
        again = make(fresh, after(fresh))
        again.load_state_dict(scheduler.state_dict())
        assert run(fresh, again, first + 12, first=stop) == found[stop:], stop


def test_state_has_upstreams_keys():
    optim = optimizer()
    scheduler = ours.CosineAnnealingWarmupLR(optim, TOTAL, 3, 0.1)
    run(optim, scheduler, 6)
    state = scheduler.state_dict()
    assert state["after_scheduler_type"] == "CosineAnnealingLR" and state["after_scheduler_dict"]["T_max"] == 17
    assert state["after_scheduler_dict"]["last_epoch"] == 2 and state["finished"] is True
    keys = {"warmup_epochs", "finished", "base_lrs", "last_epoch", "_step_count", "_last_lr"}
    assert keys <= set(state) and state["last_epoch"] == 5 and state["_step_count"] == 6
    assert ours.FlatAnnealingWarmupLR(optim, TOTAL, 3).state_dict()["delay_epochs"] == 12
    assert ours.MultiStepWarmupLR(optim, TOTAL, 3, [5]).state_dict()["after_scheduler_type"] == "MultiStepLR"


def test_loads_what_upstream_saved():
    """Its two-stage state, without the inner scheduler (a warning) and with torch's milestones, a Counter."""
    from collections import Counter

    optim = optimizer(1.0)
    scheduler = ours.MultiStepWarmupLR(optim, TOTAL, 3, [9])
    inner = {"milestones": Counter({4: 2}), "gamma": 0.5, "base_lrs": [1.0], "last_epoch": 5, "verbose": False}
    outer = {
        "warmup_epochs": 3,
        "finished": True,
        "base_lrs": [1.0],
        "last_epoch": 8,
        "_step_count": 9,
        "_last_lr": [1.0],
    }
    scheduler.load_state_dict({**outer, "after_scheduler_type": "MultiStepLR", "after_scheduler_dict": inner})
    assert rates(optim) == [0.25] and scheduler.lrs_at(6) == [1.0]
    scheduler.load_state_dict({**outer, "last_epoch": 4})
    assert rates(optim) == [1.0]
    with pytest.raises(ConfigError, match="PolynomialLR"):
        scheduler.load_state_dict({**outer, "after_scheduler_type": "PolynomialLR", "after_scheduler_dict": {}})
    with pytest.raises(ConfigError, match="1 param groups, the optimizer has 2"):
        ours.LinearWarmupLR(optimizer(), TOTAL).load_state_dict(ours.LinearWarmupLR(optim, TOTAL).state_dict())


def test_a_callable_objects_state_is_restored_and_tensor_rates_are_filled():
    class Factor:
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, t):
            return self.rate**t

    optim = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0))
    lr = optim.param_groups[0]["lr"]
    saved = ours.LambdaLR(optimizer(1.0), TOTAL, Factor(0.5)).state_dict()
    scheduler = ours.LambdaLR(optim, TOTAL, Factor(0.9))
    scheduler.load_state_dict(saved)
    scheduler.step()
    assert optim.param_groups[0]["lr"] is lr and lr.item() == 0.5


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda o: ours.FlatAnnealingLR(o, 10, 1.5), ValueError, "pct_start"),
        (lambda o: ours.FlatAnnealingWarmupLR(o, 10, pct_start=-1), ValueError, "pct_start"),
        (lambda o: ours.MultiStepLR(o, 10, []), ValueError, "milestones cannot be empty"),
        (lambda o: ours.MultiStepWarmupLR(o, 10, 0, []), ValueError, "milestones cannot be empty"),
        (lambda o: ours.MultiStepLR(o, 10), TypeError, "milestones is None"),
        (lambda o: ours.MultiStepWarmupLR(o, 10), TypeError, "milestones is None"),
        (lambda o: ours.OneCycleLR(o, 0), ValueError, "total_steps=0"),
        (lambda o: ours.OneCycleLR(o, 9, 2.0), ValueError, "pct_start"),
        (lambda o: ours.OneCycleLR(o, 9, anneal_strategy="x"), ValueError, "anneal_strategy"),
        (lambda o: ours.OneCycleLR(optimizer(cls=torch.optim.Adagrad), 9), ValueError, "cycle_momentum"),
        (lambda o: ours.LambdaLR(o, 9), TypeError, "lr_lambda"),
        (lambda o: ours.LambdaLR(o, 9, [halving]), ValueError, "1 functions, the optimizer 2"),
        (lambda o: ours.StepLR(o, 9, nonsense=1), TypeError, "nonsense"),
        (lambda o: ours.CosineAnnealingWarmupLR(o, 9, nonsense=1), TypeError, "nonsense"),
        (lambda o: ours.CosineAnnealingWarmupLR(o, 9, -1), ValueError, "warmup_epochs=-1"),
        (lambda o: DelayerScheduler(o, -1, ours.StepLR(o, 9)), ValueError, "delay_epochs=-1"),
        (lambda o: WarmupScheduler(o, 1, torch_schedulers.ReduceLROnPlateau(o)), ValueError, "ReduceLROnPlateau"),
        (lambda o: ours.StepLR(o, 9, last_epoch=3), KeyError, "initial_lr"),
        (lambda o: ours.StepLR(nn.Linear(1, 1), 9), TypeError, "Linear"),
    ],
)
def test_arguments_are_checked(make, error, words):
    with pytest.raises(error, match=words):
        make(optimizer(momentum=0.9))


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "FlatAnnealingLR", "LinearWarmupLR", "OneCycleLR", "PolynomialWarmupLR"])
def test_keywords_without_use_are_told(name):
    with pytest.warns(UserWarning, match=f"{name} has no use for verbose"):
        getattr(ours, name)(optimizer(momentum=0.9), 9, verbose=True)


def test_a_group_added_later_is_reported():
    optim = optimizer()
    scheduler = ours.LinearWarmupLR(optim, TOTAL)
    optim.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="made for 2 param groups and the optimizer has 3"):
        scheduler.step()
