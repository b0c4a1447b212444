"""C28: fp16's loss scale starts sanely, all ranks skip together, and what cannot go on says so."""

import pytest
import torch

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import digest, make_plugin, whole_params

MLP = TINY_MODELS["MLP"]
PLUGINS = pytest.mark.parametrize("plugin", ["zero1", "zero2"])


def build(plugin, **kwargs):
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin, **kwargs))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return booster, model, optimizer


def default_run(rank, world_size, plugin):
    booster, model, optimizer = build(plugin, precision="fp16")
    before, changed_by, scales = digest(whole_params(model)), None, []
    for step in range(20):
        booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(float(optimizer.grad_scaler.scale))
        if changed_by is None and digest(whole_params(model)) != before:
            changed_by = step
    return changed_by, optimizer.skipped_steps, scales


@pytest.mark.fast
@PLUGINS
def test_c28_the_default_scale_hardly_skips(plugin):
    for changed_by, skipped, scales in run_workers(2, default_run, plugin=plugin):
        assert skipped <= 2 and changed_by <= 2
        assert scales[0] <= 2.0**16 and min(scales) >= 2.0**14


def overflow_on_one_rank(rank, world_size, plugin, bad_steps):
    """Infinite gradients on rank 1 in some steps."""
    booster, model, optimizer = build(plugin, precision="fp16", initial_scale=2**8, hysteresis=2)
    digests, scales, skipped = [], [], []
    for step in range(8):
        loss = MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size))
        if rank == 1 and step in bad_steps:
            loss = loss * float("inf")
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(whole_params(model)))
        scales.append(float(optimizer.grad_scaler.scale))
        skipped.append(optimizer.skipped_steps)
    return digests, scales, skipped


@pytest.mark.fast
@PLUGINS
def test_c28_all_ranks_skip_the_same_steps_and_the_scale_halves(plugin):
    results = run_workers(2, overflow_on_one_rank, plugin=plugin, bad_steps=(2, 3, 4))
    assert results[0] == results[1]
    digests, scales, skipped = results[0]
    same = [step for step in range(1, 8) if digests[step] == digests[step - 1]]
    assert same == [2, 3, 4] and skipped == [0, 0, 1, 2, 3, 3, 3, 3]
    assert scales == [256, 256, 256, 128, 64, 64, 64, 64]  # the first overflow is forgiven: hysteresis 2


def overflow_for_ever(rank, world_size, plugin):
    from colossalai.utils.errors import GradientOverflowError

    booster, model, optimizer = build(plugin, precision="fp16", initial_scale=4, min_scale=1)
    before = digest(whole_params(model))
    for step in range(200):
        loss = MLP.loss(model, MLP.batch(step))
        booster.backward(loss * float("inf") if rank == 1 else loss, optimizer)
        try:
            optimizer.step()
        except GradientOverflowError as error:
            return step, str(error), digest(whole_params(model)) == before
        optimizer.zero_grad()
    return None


@PLUGINS
def test_c28_a_scale_stuck_at_its_floor_is_an_error_on_every_rank(plugin):
    results = run_workers(2, overflow_for_ever, plugin=plugin)
    assert results[0][0] == results[1][0] < 100
    for _, text, unchanged in results:
        assert unchanged and "min_scale" in text and "rank" in text and ("weight" in text or "bias" in text)


def nan_in_bf16(rank, world_size, plugin):
    """What the library's logger says while a NaN loss is trained on."""
    import logging

    said = []

    class Collector(logging.Handler):
        def emit(self, record):
            said.append((record.levelname, record.getMessage()))

    booster, model, optimizer = build(plugin, precision="bf16")
    from colossalai.logging import get_dist_logger

    logger = get_dist_logger()
    inner = getattr(logger, "_logger", logger)
    inner.addHandler(Collector())
    for step in range(3):
        loss = MLP.loss(model, MLP.batch(step))
        booster.backward(loss * float("nan") if step == 1 else loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return said


@PLUGINS
def test_c28_nan_outside_fp16_is_told(plugin):
    said = run_workers(2, nan_in_bf16, plugin=plugin)[0]
    assert [level for level, text in said if "not finite" in text] == ["WARNING"]


def autocast_run(rank, world_size, bad_steps):
    """DDP under Booster(mixed_precision="fp16"): torch's scaler decides alike on all ranks since DDP averages first."""
    from colossalai.booster import Booster
    from colossalai.booster.mixed_precision import FP16TorchMixedPrecision

    booster = Booster(plugin=make_plugin("ddp"), mixed_precision=FP16TorchMixedPrecision(init_scale=2.0**8))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01))
    digests, scales = [], []
    for step in range(6):
        loss = MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size))
        booster.backward(loss * float("inf") if rank == 1 and step in bad_steps else loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(whole_params(model)))
        scales.append(optimizer.scaler.get_scale())
    return digests, scales


@pytest.mark.fast
def test_c28_under_autocast_ranks_skip_together_too():
    results = run_workers(2, autocast_run, bad_steps=(2,))
    assert results[0] == results[1]
    digests, scales = results[0]
    assert [step for step in range(1, 6) if digests[step] == digests[step - 1]] == [2]
    assert scales == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
