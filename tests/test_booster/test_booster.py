"""The Booster itself: what it returns, what it leaves alone, and several models beside each other."""

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import check_close, make_plugin, whole_grads, whole_params

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]
PLUGINS = ("ddp", "fsdp", "zero1", "zero2")


def test_c12_without_a_plugin_everything_passes_through():
    from colossalai.booster import Booster

    booster = Booster()
    assert booster.boost(model := MLP.build()) == (model, None, None, None, None)

    model, plain = MLP.build(), MLP.build()
    optimizer, plain_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    criterion, loader = nn.MSELoss(), [1, 2]
    boosted = booster.boost(model, optimizer, criterion, loader, scheduler)
    assert boosted[0] is model and boosted[2:] == (criterion, loader, scheduler)
    wrapped = boosted[1]
    for step in range(3):
        booster.backward(MLP.loss(model, MLP.batch(step)), wrapped)
        MLP.loss(plain, MLP.batch(step)).backward()
        for one in (wrapped, plain_optimizer):
            one.step()
            one.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def boost_parts(rank, world_size, plugin):
    """Which of the five come back as what, whatever was given."""
    from colossalai.booster import Booster
    from colossalai.interface import ModelWrapper, OptimizerWrapper

    booster = Booster(plugin=make_plugin(plugin))
    inner = MLP.build()
    optimizer = torch.optim.AdamW(inner.parameters())
    group, criterion, loader = optimizer.param_groups[0], nn.MSELoss(), [1]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, wrapped, *rest = booster.boost(inner, optimizer, criterion, loader, scheduler)
    alone = booster.boost(MLP.build())
    again = booster.boost(model, wrapped)
    return {
        "model": isinstance(model, ModelWrapper) and model.unwrap() is inner and model.module is not None,
        "optimizer": isinstance(wrapped, OptimizerWrapper) and isinstance(wrapped, torch.optim.Optimizer),
        "same optimizer": wrapped.unwrap() is optimizer and wrapped.param_groups[0] is group,
        "rest": rest == [criterion, loader, scheduler],
        "alone": isinstance(alone[0], ModelWrapper) and alone[1:] == (None, None, None, None),
        "boosting again changes nothing": again[0] is model and again[1] is wrapped,
    }


@pytest.mark.parametrize("plugin", PLUGINS)
def test_c12_boost_always_returns_five(plugin):
    for found in run_workers(2, boost_parts, plugin=plugin):
        assert found == dict.fromkeys(found, True)


def adversaries(make_booster, place, wrap):
    """Generator and discriminator trained in turn, a teacher beside them; yields their parameters at the end."""
    torch.manual_seed(3)
    nets = {
        "g": nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)),
        "d": nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)),
        "teacher": nn.Linear(7, 7),
    }
    optimizers = {name: torch.optim.SGD(nets[name].parameters(), lr=0.1, momentum=0.9) for name in "gd"}
    g, d, teacher, backward = wrap(make_booster, nets, optimizers)
    for step in range(4):
        x = MLP.part(MLP.batch(step), *place)["x"]
        if step % 2 == 0:
            fake = g[0](x).detach()
            backward((d[0](fake).square() + (d[0](x) - 1).square()).mean(), d[1])
            d[1].step()
        else:
            with torch.no_grad():
                target = teacher(x)
            fake = g[0](x)
            backward((d[0](fake) - 1).square().mean() + (fake - target).square().mean(), g[1])
            g[1].step()
        g[1].zero_grad()
        d[1].zero_grad()
    return {"g": g[0], "d": d[0], "teacher": teacher}


def train_adversaries(rank, world_size, plugin, boosters):
    from colossalai.booster import Booster

    shared = Booster(plugin=make_plugin(plugin))

    def wrap(make_booster, nets, optimizers):
        pick = [shared if boosters == 1 else make_booster() for _ in range(3)]
        g = pick[0].boost(nets["g"], optimizers["g"])[:2]
        d = pick[1].boost(nets["d"], optimizers["d"])[:2]
        return g, d, pick[2].boost(nets["teacher"])[0], shared.backward

    found = adversaries(lambda: Booster(plugin=make_plugin(plugin)), (rank, world_size), wrap)
    return {name: whole_params(model) for name, model in found.items()}


@pytest.mark.parametrize("boosters", [1, 3])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_c13_several_models_do_not_touch_each_other(plugin, boosters):
    def plain(make_booster, nets, optimizers):
        pairs = [(nets[name], optimizers[name]) for name in "gd"]
        return *pairs, nets["teacher"], lambda loss, optimizer: loss.backward()

    wanted = adversaries(None, (0, 1), plain)
    for found in run_workers(2, train_adversaries, plugin=plugin, boosters=boosters):
        for name, model in wanted.items():
            check_close(name, found[name], {n: p.detach() for n, p in model.named_parameters()}, 1e-5)


def read_gradients(rank, world_size, plugin, booster_args=None, **plugin_args):
    """Gradients after one and after two backward calls, and after zero_grad."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin, **plugin_args), **(booster_args or {}))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in range(2):
        booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size)), optimizer)
        found.append(whole_grads(model, optimizer))
    optimizer.zero_grad()
    return found, whole_grads(model, optimizer)


FP16 = {"precision": "fp16", "initial_scale": 2.0**10}


@pytest.mark.parametrize(
    "plugin, args, tolerance",
    [(plugin, {}, 1e-5) for plugin in PLUGINS]
    # fp16 against fp32: 11 bits a factor in three layers of products, and only to find a wrong factor such as the loss
    # scale
    + [("zero1", FP16, 4e-3), ("zero2", FP16, 4e-3), ("ddp", {"booster_args": {"mixed_precision": "fp16"}}, 4e-3)],
    ids=lambda value: value if isinstance(value, str) else "fp16" if value else "fp32",
)
def test_c14_gradients_are_read_whole_and_unscaled(plugin, args, tolerance):
    wanted, model = [], MLP.build()
    for step in range(2):
        MLP.loss(model, MLP.batch(step)).backward()
        wanted.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for found, after in run_workers(2, read_gradients, plugin=plugin, **args):
        for step in range(2):
            check_close(f"gradients after {step + 1} backward calls", found[step], wanted[step], tolerance)
        assert after == {}


def refuse(rank, world_size):
    """Misuse of the Booster: what each call raises."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model = MLP.build()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = {
        "plugin": lambda: Booster(plugin=object()),
        "mixed_precision name": lambda: Booster(mixed_precision="xyz"),
        "mixed_precision type": lambda: Booster(mixed_precision=16),
        "execute_pipeline": lambda: booster.execute_pipeline(iter([]), boosted, None, optimizer),
        "no_sync without plugin": lambda: Booster().no_sync(model),
        "enable_lora without plugin": lambda: Booster().enable_lora(model),
        "enable_lora without config": lambda: booster.enable_lora(model),
        "enable_lora after boost": lambda: booster.enable_lora(boosted, lora_config=object()),
        "save of an unboosted model": lambda: booster.save_model(nn.Linear(2, 2), "/nowhere/model"),
        "save of an unboosted optimizer": lambda: booster.save_optimizer(torch.optim.SGD(model.parameters()), "/nowhere/o"),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = None
        except Exception as error:
            said[name] = (isinstance(error, AssertionError), isinstance(error, ValueError), str(error))
    return said


def test_appendix_c_misuse_of_the_booster():
    for said in run_workers(2, refuse):
        assert all(value is not None for value in said.values()), said
        assert all(assertion for assertion, _, _ in said.values()), said
        assert said["mixed_precision name"][1] and said["mixed_precision type"][1]
        assert "xyz" in said["mixed_precision name"][2] and "16" in said["mixed_precision type"][2]
        assert "plugin" in said["plugin"][2] and "boost" in said["save of an unboosted model"][2]
