"""Optimizer state of ZeRO: saved whole or in parts, loaded into any number of ranks, with and without state to save."""

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.testing import TINY_MODELS, check_state_dict_equal
from tests.harness import run_workers
from tests.harness.training import ADAM_EPS, check_close, make_plugin, whole_params

MLP = TINY_MODELS["MLP"]


class Late(nn.Module):
    """An extra Linear(5, 5) that is used once the batch says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.late = MLP.build(), nn.Linear(5, 5)

    def forward(self, x, late):
        return self.late(self.net(x)) if late else self.net(x)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS)


def one_step(booster, model, optimizer, step, late, place):
    batch = MLP.part(MLP.batch(step), *place)
    booster.backward(nn.functional.mse_loss(model(batch["x"], late), batch["y"]), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def save_at(rank, world_size, plugin, folder, shard):
    """Save before any step and after two; then load each into a fresh pair and go on with the late layer."""
    from colossalai.booster import Booster

    def fresh():
        booster = Booster(plugin=make_plugin(plugin))
        model = Late()
        model, optimizer, *_ = booster.boost(model, adamw(model))
        return booster, model, optimizer

    place, found = (rank, world_size), {}
    booster, model, optimizer = fresh()
    for steps in range(3):
        if steps in (0, 2):
            booster.save_model(model, f"{folder}/model{steps}", shard=shard)
            booster.save_optimizer(optimizer, f"{folder}/optimizer{steps}", shard=shard, size_per_shard=1)
        one_step(booster, model, optimizer, steps, False, place)
    for steps in (0, 2):
        booster, model, optimizer = fresh()
        booster.load_model(model, f"{folder}/model{steps}")
        booster.load_optimizer(optimizer, f"{folder}/optimizer{steps}")
        for step in range(steps, 4):
            one_step(booster, model, optimizer, step, step >= 2, place)
        found[steps] = whole_params(model)
    return found


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_c31_parameters_without_state_are_saved_and_loaded(plugin, shard, tmp_path):
    model = Late()
    optimizer = adamw(model)
    for step in range(4):
        batch = MLP.batch(step)
        nn.functional.mse_loss(model(batch["x"], step >= 2), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for found in run_workers(2, save_at, plugin=plugin, folder=str(tmp_path), shard=shard):
        check_close("resumed before any step", found[0], wanted, 1e-5)
        check_close("resumed after two steps", found[2], wanted, 1e-5)


def state_dicts(rank, world_size, stage, source=None):
    """state_dict after three steps; or, with ``source``, of a fresh optimizer that loaded it."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, adamw(model))
    if source is not None:
        optimizer.load_state_dict(source)
    else:
        for step in range(3):
            booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size)), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.state_dict()


@pytest.mark.parametrize("stage", [1, 2])
def test_state_dict_is_that_of_one_process_and_loads_at_any_world_size(stage):
    model = MLP.build()
    optimizer = adamw(model)
    for step in range(3):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = optimizer.state_dict()
    saved = run_workers(3, state_dicts, stage=stage)[0]
    assert saved["param_groups"] == wanted["param_groups"] and saved["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert state.keys() == saved["state"][index].keys()
        check_close(f"state of {index}", saved["state"][index], state, 1e-5)
    for world_size in (1, 2, 4):
        for loaded in run_workers(world_size, state_dicts, stage=stage, source=saved):
            check_state_dict_equal(loaded, saved)


def upstream_names(rank, world_size, stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(torch.full((2, 5), 1.0 + rank)).sum(), optimizer)
    pieces = optimizer.get_working_grads_by_group_id(0)
    masters = optimizer._master_param_groups_of_current_rank[0]
    assert [p.numel() for p in pieces] == [p.numel() for p in masters]
    return torch.cat(pieces) if pieces else torch.empty(0)


@pytest.mark.parametrize("stage", [1, 2])
def test_names_that_scripts_of_0_5_read(stage):
    """Averaged over two ranks with inputs 1 and 2, each of two rows: weight gradients 3, bias gradients 2."""
    whole = torch.cat(run_workers(2, upstream_names, stage=stage))
    assert sorted(whole.tolist()) == [2.0] * 3 + [3.0] * 15


def in_shards(rank, world_size, limit):
    model = MLP.build()
    booster = Booster(plugin=make_plugin("zero1"))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), eps=ADAM_EPS))
    booster.backward(model(MLP.batch(0)["x"]).square().mean(), optimizer)
    optimizer.step()
    whole, shards = optimizer.state_dict()["state"], list(optimizer.state_dict_shard(limit))
    joined = {param_id: entry for block, _ in shards for param_id, entry in block.items()}
    assert list(joined) == list(whole) == [0, 1, 2, 3]
    for param_id, entry in whole.items():
        check_state_dict_equal(joined[param_id], entry)
    return len(shards), sum(size for _, size in shards) * 2**20


@pytest.mark.parametrize("limit, count", [(1024, 1), (1e-6, 4)])
def test_state_dict_shard_yields_all_within_the_limit(limit, count):
    """Two fp32 moments of 91 + 13 + 65 + 5 elements, and four counters of one."""
    for shards, size in run_workers(2, in_shards, limit=limit):
        assert shards == count and round(size) == 4 * (2 * 174 + 4)
