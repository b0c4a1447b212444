"""LowLevelZeroPlugin: arguments outside what is supported raise at construction, with their name."""

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import make_plugin

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]

REFUSED = {
    "stage": {"stage": 3},
    "precision": {"precision": "fp8"},
    "norm_type": {"norm_type": 1.0},
    "extra_dp_size": {"extra_dp_size": 3},
    "max_norm": {"max_norm": -1.0},
    "reduce_bucket_size_in_m": {"reduce_bucket_size_in_m": 0},
    "initial_scale": {"precision": "fp16", "initial_scale": 0.5},
    "growth_factor": {"precision": "fp16", "growth_factor": 0.5},
    "backoff_factor": {"precision": "fp16", "backoff_factor": 2.0},
    "hysteresis": {"precision": "fp16", "hysteresis": -1},
    "loss_reduction": {"loss_reduction": "sum"},
    "communication_dtype": {"communication_dtype": torch.int32},
    "fp8_communication": {"fp8_communication": True},
    "use_fp8": {"use_fp8": True},
}
ACCEPTED = {
    "upstream's typical": {"stage": 2, "precision": "fp16", "initial_scale": 2**5, "max_norm": 1.0},
    "scale 1": {"precision": "fp16", "initial_scale": 1},
    "upstream's default scale": {"precision": "fp16", "initial_scale": 2**32},
    "fp8 off": {"fp8_communication": False, "use_fp8": False},
    "all defaults": {},
}


def construct(rank, world_size):
    """What each set of arguments raises, at the latest when a model is boosted."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.utils.errors import ConfigError, NotBuiltError

    said = {}
    for name, args in (REFUSED | ACCEPTED).items():
        try:
            booster = Booster(plugin=LowLevelZeroPlugin(**args))
            model = MLP.build()
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            said[name] = ""
        except (ConfigError, NotBuiltError) as error:
            said[name] = str(error)
    return said


def test_appendix_c_zero_arguments():
    for said in run_workers(2, construct):
        assert {name: said[name] for name in ACCEPTED} == dict.fromkeys(ACCEPTED, "")
        silent = [name for name in REFUSED if name not in said[name]]
        assert not silent, {name: said[name] for name in silent}


def misuse_optimizer(rank, world_size):
    """Calls on the boosted optimizer that cannot work."""
    from colossalai.booster import Booster
    from colossalai.utils.errors import ConfigError
    from colossalai.zero import LowLevelZeroOptimizer

    booster = Booster(plugin=make_plugin("zero1"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    frozen = MLP.build().requires_grad_(False)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    group = torch.distributed.group.WORLD
    fresh = MLP.build()
    calls = {
        "closure": lambda: optimizer.step(lambda: None),
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "no_sync": lambda: booster.no_sync(model),
        "requires a gradient": lambda: booster.boost(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1)),
        "dtypes": lambda: LowLevelZeroOptimizer(torch.optim.SGD(mixed.parameters(), lr=0.1)),
        "dp_process_group": lambda: LowLevelZeroOptimizer(
            torch.optim.SGD(fresh.parameters(), lr=0.1), {group: list(fresh.parameters())}, dp_process_group=group
        ),
        "extra_dp_group": lambda: LowLevelZeroOptimizer(torch.optim.SGD(fresh.parameters(), lr=0.1), extra_dp_group=group),
        "pg_to_param_list": lambda: LowLevelZeroOptimizer(
            torch.optim.SGD(fresh.parameters(), lr=0.1), {group: list(fresh.parameters())[:2]}
        ),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_misuse_of_the_zero_optimizer():
    for said in run_workers(2, misuse_optimizer):
        silent = [name for name in said if name not in said[name]]
        assert not silent, {name: said[name] for name in silent}


def without_groups(rank, world_size):
    """Plugins need process groups; here there are none for a moment."""
    import torch.distributed as dist

    dist.destroy_process_group()
    said = []
    for name in ("ddp", "fsdp", "zero1"):
        try:
            make_plugin(name)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_plugins_without_launch_say_so():
    from tests.harness import get_pool

    said = run_workers(1, without_groups)[0]
    get_pool(1).close()
    assert len(said) == 3 and all("ConfigError" in text and "launch" in text for text in said)
