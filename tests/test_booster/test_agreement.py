"""C11: ranks that do not agree, or do not come, are an error that says so within its limit."""

import time

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import get_pool, run_workers
from tests.harness.training import make_plugin

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]


def disagree(rank, world_size, what):
    from colossalai.booster import Booster
    from colossalai.utils.errors import DisagreementError

    plugins = {
        "stage": lambda: make_plugin(f"zero{1 + rank}"),
        "precision": lambda: make_plugin("zero1", precision=("fp32", "bf16")[rank]),
        "max_norm": lambda: make_plugin("zero1", max_norm=float(rank)),
        "plugin": lambda: make_plugin(("ddp", "zero1")[rank]),
        "find_unused_parameters": lambda: make_plugin("ddp", find_unused_parameters=bool(rank)),
        "sharding_strategy": lambda: make_plugin("fsdp", sharding_strategy=("FULL_SHARD", "SHARD_GRAD_OP")[rank]),
    }
    begin = time.monotonic()
    model = nn.Linear(7, 5 + rank) if what == "model" else MLP.build()
    make = torch.optim.SGD if what == "optimizer" and rank else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=0.1)
    try:
        Booster(plugin=plugins.get(what, lambda: make_plugin("zero1"))()).boost(model, optimizer)
    except DisagreementError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


@pytest.mark.parametrize(
    "what, named",
    [
        ("stage", "stage"),
        ("precision", "precision"),
        ("max_norm", "max_norm"),
        ("plugin", "plugin"),
        ("find_unused_parameters", "find_unused_parameters"),
        ("sharding_strategy", "sharding_strategy"),
        ("model", "model"),
        ("optimizer", "optimizer"),
    ],
)
def test_c11_ranks_that_disagree_are_told_about_what(what, named):
    for said, seconds in run_workers(2, disagree, what=what):
        assert named in said and "rank" in said and seconds < 30


def stay_away(rank, world_size):
    import os

    from colossalai.booster import Booster
    from colossalai.utils.errors import DisagreementError

    os.environ["COLOSSALAI_TIMEOUT"] = "3"
    begin = time.monotonic()
    try:
        if rank == 0:
            model = MLP.build()
            Booster(plugin=make_plugin("zero1")).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except DisagreementError as error:
        return str(error), time.monotonic() - begin
    finally:
        del os.environ["COLOSSALAI_TIMEOUT"]
    return None


def test_c11_a_rank_that_never_boosts_is_named_at_the_limit():
    said, seconds = run_workers(2, stay_away)[0]
    get_pool(2).close()  # rank 1 has yet to hear of the failed round
    assert "rank 1" in said and "Booster.boost" in said and 2 < seconds < 15
