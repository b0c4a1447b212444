"""Every data-parallel plugin trains what one process of plain torch trains.

Losses, norms, gradients and parameters of 3 steps, in fp32 to 1e-5: models x optimizers x clipping x accumulation x
world sizes.
"""

from functools import lru_cache
from itertools import product

import pytest

from tests.harness import CaseFailure, run_cases
from tests.harness.training import STEPS, Case, check_parity, reference, train

PLUGINS = ("ddp", "fsdp", "zero1", "zero2")
WORLDS = (1, 2, 3, 4)
MODELS = ("MLP", "LLA", "LLA-T", "GPT")
CLIPS = (0.0, 0.05)
WINDOWS = ((1, "plain"), (4, "plain"), (4, "no_sync"))
TOLERANCE = 1e-5


def cases_of(plugin: str, world_size: int, model: str) -> dict[str, Case]:
    """The table; SGD runs undisturbed, AdamW runs read every gradient of the first and the last step."""
    rows = 12 if world_size == 3 and model != "MLP" else 0  # 4 rows are not divisible by 3
    cases = [
        Case(
            plugin=plugin,
            model=model,
            optimizer=optimizer,
            max_norm=max_norm,
            micro=micro,
            how=how,
            rows=rows,
            read_grads=(0, STEPS - 1) if optimizer == "adamw" else (),
        )
        for optimizer, max_norm, (micro, how) in product(("sgd", "adamw"), CLIPS, WINDOWS)
    ]
    return {case.id: case for case in cases}


@lru_cache
def results_of(plugin: str, world_size: int, model: str) -> dict:
    cases = {name: {"case": case} for name, case in cases_of(plugin, world_size, model).items()}
    return run_cases(world_size, train, cases, timeout=90)


def table() -> list:
    rows = []
    for world_size, plugin, model in product(WORLDS, PLUGINS, MODELS):
        fast = world_size == 2 and (model == "MLP" or (model == "LLA-T" and plugin in ("ddp", "zero2")))
        marks = [pytest.mark.fast] if fast else []
        for name in cases_of(plugin, world_size, model):
            label = f"{world_size}-{plugin}-{name}"
            rows.append(pytest.param(world_size, plugin, model, name, id=label, marks=marks))
    return rows


@pytest.mark.parametrize("world_size, plugin, model, name", table())
def test_parity_with_one_process(world_size, plugin, model, name):
    results = results_of(plugin, world_size, model)[name]
    assert not isinstance(results, CaseFailure), str(results)
    check_parity(results, reference(cases_of(plugin, world_size, model)[name]), TOLERANCE)
