"""C75: learning rates are those of one process, whoever made the scheduler, and a resume goes on where they were."""

import pytest
import torch

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import check_close, make_plugin, whole_params

MLP = TINY_MODELS["MLP"]
TOTAL, STOP = 20, 7


def make_optimizer(model):
    groups = [{"params": [p], "lr": 0.01 if p.dim() == 1 else 0.1} for p in model.parameters()]
    return torch.optim.SGD(groups, momentum=0.9)


def make_scheduler(kind, optimizer):
    if kind == "own":
        from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR

        return CosineAnnealingWarmupLR(optimizer, total_steps=TOTAL, warmup_steps=3)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def prepare(plugin, kind, built):
    """Booster, model, optimizer and scheduler, the last made before or after boost."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin))
    model = MLP.build()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(kind, optimizer) if built == "before" else None
    model, optimizer, *_, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler or make_scheduler(kind, optimizer)


def advance(booster, model, optimizer, scheduler, steps, place):
    found = []
    for step in steps:
        booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), *place)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(rates(optimizer))
    return found


def train(rank, world_size, plugin, kind, built, folder):
    """The whole run, and one that is saved at step 7 and resumed in fresh objects."""
    place, one = (rank, world_size), prepare(plugin, kind, built)
    straight = advance(*one, range(TOTAL), place)

    stopped = prepare(plugin, kind, built)
    resumed = advance(*stopped, range(STOP), place)
    booster, model, optimizer, scheduler = stopped
    booster.save_model(model, f"{folder}/model.bin")
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    booster.save_lr_scheduler(scheduler, f"{folder}/scheduler.bin")
    booster, model, optimizer, scheduler = fresh = prepare(plugin, kind, built)
    booster.load_model(model, f"{folder}/model.bin")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(scheduler, f"{folder}/scheduler.bin")
    at_load = rates(optimizer)
    resumed += advance(*fresh, range(STOP, TOTAL), place)
    return straight, resumed, at_load, whole_params(one[1]), whole_params(model)


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", ["own", "torch"])
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_c75_learning_rates_with_and_without_resume(plugin, kind, built, tmp_path):
    model = MLP.build()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(kind, optimizer)
    wanted = []
    for step in range(TOTAL):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        wanted.append(rates(optimizer))
    assert len({tuple(r) for r in wanted}) > 10
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        results = run_workers(world_size, train, plugin=plugin, kind=kind, built=built, folder=str(folder))
        for straight, resumed, at_load, params, resumed_params in results:
            assert straight == wanted and resumed == wanted and at_load == wanted[STOP - 1]
            check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)
            assert all(torch.equal(params[name], resumed_params[name]) for name in params)  # fp32: bitwise


def other_frameworks_scheduler(rank, world_size, plugin):
    """Hugging Face's scheduler and one of torch's that is step-free, both on the wrapper, under torch's own checks."""
    import warnings

    from transformers import get_linear_schedule_with_warmup

    booster, model, optimizer, _ = prepare(plugin, "torch", "before")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, 10)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        advance(booster, model, optimizer, scheduler, range(3), (rank, world_size))
        plateau.step(1.0)
    return rates(optimizer)


@pytest.mark.parametrize("plugin", ["ddp", "zero1"])
def test_c75_any_scheduler_accepts_the_wrapper(plugin):
    for found in run_workers(2, other_frameworks_scheduler, plugin=plugin):
        assert found == pytest.approx([0.1 * 7 / 8, 0.01 * 7 / 8] * 2)
