"""Norms and clipping are those of one process, on every rank."""

from itertools import product

import pytest
import torch

from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import Case, check_parity, make_plugin, reference, train

PLUGINS = ("ddp", "fsdp", "zero1", "zero2")
NORMS = (0.0, 1e-3, 0.1, 1e9)


def cases() -> dict[str, Case]:
    """SGD with lr 1: a wrong factor shows in full."""
    table = [
        Case(plugin=plugin, model=model, optimizer="sgd1", max_norm=max_norm)
        for plugin, model, max_norm in product(PLUGINS, ("MLP", "LLA-T"), NORMS)
    ]
    table += [
        Case(plugin=plugin, model="MLP", optimizer="sgd1", max_norm=0.1, micro=4, how=how, plugin_args=args)
        for plugin, how in product(("zero1", "zero2"), ("plain", "no_sync"))
        for args in ((), (("cpu_offload", True),), (("overlap_allgather", True),))
    ]
    return {f"{case.plugin}-{case.id}": case for case in table}


_results: dict = {}


@pytest.mark.fast
@pytest.mark.parametrize("name", cases())
def test_c33_clipped_update_and_norm(name):
    if not _results:
        _results.update(run_cases(2, train, {each: {"case": case} for each, case in cases().items()}))
    results, case = _results[name], cases()[name]
    assert not isinstance(results, CaseFailure), str(results)
    check_parity(results, reference(case))
    if case.plugin.startswith("zero"):
        assert all(norm is not None for result in results for norm in result["norms"])


def clip_by_call(rank, world_size, plugin, stepwise):
    """Two steps, clipped by the call that DDP and FSDP have; ``stepwise``: clipped after each of two backward calls."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for step in range(2):
        for part in range(2):
            x = torch.linspace(-1 - step, 2 + part, 8 * world_size).view(2 * world_size, 4)[2 * rank : 2 * rank + 2]
            booster.backward(model(x).square().mean(), optimizer)
            if stepwise or part == 1:
                norms.append(float(optimizer.clip_grad_by_norm(0.3)))
        optimizer.step()
        optimizer.zero_grad()
    weight = next(model.unwrap().parameters())
    return norms, (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()


def clipped_reference(stepwise, world_size):
    torch.manual_seed(0)
    model, norms = torch.nn.Linear(4, 4, bias=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(2):
        for part in range(2):
            x = torch.linspace(-1 - step, 2 + part, 8 * world_size).view(2 * world_size, 4)
            model(x).square().mean().backward()
            if stepwise or part == 1:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.weight.detach()


@pytest.mark.parametrize("stepwise", [False, True], ids=["once", "stepwise"])
@pytest.mark.parametrize("plugin", ["fsdp", "zero1", "zero2"])
def test_clip_by_the_call(plugin, stepwise):
    norms, weight = clipped_reference(stepwise, 2)
    for found, whole in run_workers(2, clip_by_call, plugin=plugin, stepwise=stepwise):
        assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(whole, weight, rtol=1e-5, atol=1e-6)


def clip_by_value(rank, world_size, plugin):
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward((model(torch.eye(4)) * torch.linspace(-2, 2, 16).view(4, 4)).sum(), optimizer)
    optimizer.clip_grad_by_value(0.5)
    return optimizer.get_param_grad(next(model.unwrap().parameters()))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_clip_by_value(plugin):
    wanted = torch.linspace(-2, 2, 16).view(4, 4).T.clamp(-0.5, 0.5)
    for grad in run_workers(2, clip_by_value, plugin=plugin):
        assert torch.allclose(grad, wanted, rtol=1e-6)
