"""C85: what a step communicates, counted by an observer outside the library; the library's ledger agrees with it."""

import pytest
import torch
from torch import nn

from tests.harness import run_workers
from tests.harness.observer import observe
from tests.harness.training import make_plugin

pytestmark = pytest.mark.fast
WIDTH = 200
STEPS = 3
FLAGS = 64
"""Bytes a step may send beside parameters: one norm, and a flag for each parameter and bucket."""


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers)


def count(rank, world_size, stage, micro, precision, **plugin_args):
    """By step: elements, calls and bytes seen outside, and what the ledger has."""
    from colossalai import comm
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}", precision=precision, **plugin_args))
    model = build()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    dtype = next(model.parameters()).dtype
    found = []
    for _ in range(STEPS):
        with observe() as seen, comm.record() as ledger:
            for _ in range(micro):
                x = torch.randn(4, WIDTH, dtype=dtype)
                booster.backward(model(x).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append(
            {
                "elements": dict(seen.elements),
                "bytes": dict(seen.bytes),
                "calls": dict(seen.calls),
                "ledger": {verb: ledger.elements(verb) for verb in ("reduce_scatter", "all_gather_into", "all_reduce")},
                "ledger bytes": {verb: ledger.bytes(verb) for verb in ("reduce_scatter", "all_gather_into", "all_reduce")},
                "rest": ledger.bytes() - sum(ledger.bytes(v) for v in ("reduce_scatter", "all_gather_into", "all_reduce")),
            }
        )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_c85_two_p_elements_a_step(stage, precision, world_size):
    total = sum(p.numel() for p in build().parameters())
    for found in run_workers(world_size, count, stage=stage, micro=1, precision=precision):
        for step in found:
            assert set(step["elements"]) <= {"all_to_all_single", "broadcast", "all_reduce"}
            moved = step["elements"]["all_to_all_single"] + step["elements"]["broadcast"]
            assert 2 * total <= moved <= 2 * total * 1.01, moved / total
            assert step["bytes"].get("all_reduce", 0) <= FLAGS
            itemsize = 4 if precision == "fp32" else 2
            assert step["bytes"]["broadcast"] == step["elements"]["broadcast"] * itemsize
            assert step["bytes"]["all_to_all_single"] == step["elements"]["all_to_all_single"] * itemsize


@pytest.mark.parametrize("stage, reductions", [(1, 1), (2, 4)])
def test_c85_accumulation_costs_what_the_stage_says(stage, reductions):
    """4 backward calls: stage 1 still 2P, stage 2 (k + 1)P."""
    total = sum(p.numel() for p in build().parameters())
    for found in run_workers(2, count, stage=stage, micro=4, precision="fp32"):
        for step in found[1:]:
            assert total * reductions <= step["elements"]["all_to_all_single"] <= total * reductions * 1.01
            assert total <= step["elements"]["broadcast"] <= total * 1.01


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_c85_the_ledger_is_what_the_observer_saw(stage, precision):
    for found in run_workers(2, count, stage=stage, micro=2, precision=precision, max_norm=0.1):
        for step in found:
            assert step["rest"] == 0
            assert step["ledger"]["reduce_scatter"] == step["elements"]["all_to_all_single"]
            assert step["ledger bytes"]["reduce_scatter"] == step["bytes"]["all_to_all_single"]
            assert step["ledger"]["all_gather_into"] == step["elements"]["broadcast"]
            assert step["ledger bytes"]["all_gather_into"] == step["bytes"]["broadcast"]
            assert step["ledger bytes"]["all_reduce"] == step["bytes"]["all_reduce"]


def test_c85_replicas_add_an_all_reduce_of_one_slice():
    """extra_dp_size=2 on 4 ranks: within the shard group 2P, between the replicas an all-reduce of P / 2."""
    total = sum(p.numel() for p in build().parameters())
    for found in run_workers(4, count, stage=1, micro=1, precision="fp32", extra_dp_size=2):
        for step in found:
            assert step["elements"]["all_to_all_single"] + step["elements"]["broadcast"] <= 2 * total * 1.01
            assert total <= step["elements"]["all_reduce"] <= total * 1.01 + 2 * FLAGS
