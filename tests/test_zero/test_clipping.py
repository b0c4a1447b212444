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


def clip_in_vain(rank, world_size):
    """Under ZeRO the step clips: a call that could not have an effect says so instead of having none."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("zero1"))
    model = torch.nn.Linear(3, 2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = [optimizer.get_grad_norm()]
    for call in (lambda: optimizer.clip_grad_by_norm(1.0), lambda: optimizer.clip_grad_by_value(1.0)):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_clipping_that_would_have_no_effect_names_max_norm():
    for before, *said in run_workers(2, clip_in_vain):
        assert before is None
        assert len(said) == 2 and all("ConfigError" in text and "max_norm" in text for text in said)


def clip_by_value(rank, world_size, plugin):
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward((model(torch.eye(4)) * torch.linspace(-2, 2, 16).view(4, 4)).sum(), optimizer)
    optimizer.clip_grad_by_value(0.5)
    return optimizer.get_param_grad(next(model.unwrap().parameters()))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_clip_by_value(plugin):
    wanted = torch.linspace(-2, 2, 16).view(4, 4).T.clamp(-0.5, 0.5)
    for grad in run_workers(2, clip_by_value, plugin=plugin):
        assert torch.allclose(grad, wanted, rtol=1e-6)
