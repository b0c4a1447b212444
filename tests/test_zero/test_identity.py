"""A parameter that left its bucket would no longer be trained: the step raises by name instead."""

import re

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import CaseFailure, run_cases
from tests.harness.training import make_plugin

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]


def halve(model):
    model.unwrap().half()


def to_double(model):
    model.to(torch.float64)


def assign(model):
    inner = model.unwrap()
    inner.load_state_dict({name: value.clone() for name, value in inner.state_dict().items()}, assign=True)


def replace_data(model):
    model.unwrap()[2].weight.data = model.unwrap()[2].weight.data.clone()


def replace_parameter(model):
    model.unwrap()[2].weight = nn.Parameter(model.unwrap()[2].weight.detach().clone())


def replace_linear(model):
    model.unwrap()[2] = nn.Linear(13, 5)


def unfreeze(model):
    model.unwrap()[0].weight.requires_grad_(True)


def nothing(model):
    """Loading in place keeps every view."""
    inner = model.unwrap()
    inner.load_state_dict({name: value.clone() for name, value in inner.state_dict().items()})
    model.to("cpu").float()
    model.train()


CHANGES = {f.__name__: f for f in (halve, to_double, assign, replace_data, replace_parameter, replace_linear, unfreeze, nothing)}


def change_and_step(rank, world_size, name, stage):
    """What the next step says, forward and backward having gone as they may."""
    from colossalai.booster import Booster
    from colossalai.utils.errors import LayoutError

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model[0].weight.requires_grad_(name != "unfreeze")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    CHANGES[name](model)
    dtype = next(model.parameters()).dtype
    try:
        batch = {key: value.to(dtype) for key, value in MLP.batch(0).items()}
        booster.backward(model(batch["x"]).sum(), optimizer)
        optimizer.step()
    except LayoutError as error:
        return str(error)
    return ""


CASES = {f"{name}-zero{stage}": {"name": name, "stage": stage} for name in CHANGES for stage in (1, 2)}
_results: dict = {}


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_cut_from_its_bucket_is_named(case):
    if not _results:
        _results.update(run_cases(2, change_and_step, CASES))
    results = _results[case]
    assert not isinstance(results, CaseFailure), str(results)
    for said in results:
        if CASES[case]["name"] == "nothing":
            assert said == ""
        else:
            assert re.search(r"parameter '[02]\.(weight|bias)'", said) and "boost" in said
