"""Loss scalers: traces by hand, limits, and a resume that goes on the same way."""

import io
import random

import pytest
import torch

from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler, ConstantGradScaler, DynamicGradScaler
from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import MAX_SKIPPED_AT_FLOOR

pytestmark = pytest.mark.fast


def trace(scaler, overflows):
    found = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        found.append(scaler.value)
    return found


def test_first_overflow_is_forgiven_and_then_every_one_counts():
    scaler = DynamicGradScaler(16.0, hysteresis=2)
    assert trace(scaler, [1, 0, 0, 1, 0, 1, 1]) == [16, 16, 16, 8, 8, 4, 2]


def test_growth_brings_the_hysteresis_back():
    scaler = DynamicGradScaler(16.0, growth_interval=3, hysteresis=2)
    assert trace(scaler, [1, 1, 0, 0, 0]) == [16, 8, 8, 8, 16]
    assert trace(scaler, [1, 0, 0, 1]) == [16, 16, 16, 8]


def test_an_overflow_restarts_the_growth_interval():
    assert trace(DynamicGradScaler(4.0, growth_interval=3, hysteresis=9), [0, 0, 1, 0, 0, 0]) == [4, 4, 4, 4, 4, 8]


@pytest.mark.parametrize("hysteresis", [0, 1])
def test_without_hysteresis_the_first_overflow_counts(hysteresis):
    assert trace(DynamicGradScaler(16.0, hysteresis=hysteresis), [1, 1]) == [8, 4]


def test_limits():
    scaler = DynamicGradScaler(4.0, growth_interval=1, min_scale=1, max_scale=8, hysteresis=1)
    assert trace(scaler, [0, 0, 0]) == [8, 8, 8]
    assert trace(scaler, [1] * 5) == [4, 2, 1, 1, 1] and scaler.at_floor
    free = DynamicGradScaler(1.0, hysteresis=1, growth_interval=1)
    assert min(trace(free, [1] * 200)) == 2.0**-126 and torch.isfinite(free.inv_scale).all()
    assert max(trace(free, [0] * 300)) == 2.0**127 and torch.isfinite(free.scale).all()


def test_skips_are_counted_and_stuck_says_when_to_stop():
    scaler = DynamicGradScaler(4.0, min_scale=1, hysteresis=1)
    trace(scaler, [1, 0, 1])
    assert (scaler.steps, scaler.skipped_steps, scaler.skipped_in_a_row, scaler.at_floor) == (3, 2, 1, True)
    trace(scaler, [1] * (MAX_SKIPPED_AT_FLOOR - 1))
    assert not scaler.stuck
    trace(scaler, [1])
    assert scaler.stuck and scaler.skipped_steps == MAX_SKIPPED_AT_FLOOR + 2
    trace(scaler, [0])
    assert not scaler.stuck and scaler.skipped_in_a_row == 0
    assert ConstantGradScaler(8.0, False).at_floor


def test_scale_and_inverse_are_one_element_tensors():
    scaler = ConstantGradScaler(8.0, verbose=True)
    scaler.update(True)
    assert scaler.scale.tolist() == [8.0] and scaler.inv_scale.tolist() == [0.125] and scaler.skipped_steps == 1
    assert scaler.scale.dtype == torch.float32 and issubclass(DynamicGradScaler, BaseGradScaler)


def test_c28_defaults():
    scaler = DynamicGradScaler()
    assert (scaler.value, scaler.growth_interval, scaler.hysteresis) == (2.0**16, 1000, 2)
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.min_scale, scaler.max_scale) == (2, 0.5, None, None)


@pytest.mark.parametrize("stop", range(0, 40, 3))
def test_a_resumed_scaler_goes_on_as_the_first_would(stop):
    overflows = [random.Random(1).random() < 0.4 for _ in range(1)] + [random.Random(i).random() < 0.3 for i in range(60)]
    whole = DynamicGradScaler(2.0**10, growth_interval=4, hysteresis=3, min_scale=1, max_scale=2.0**11)
    first = DynamicGradScaler(2.0**10, growth_interval=4, hysteresis=3, min_scale=1, max_scale=2.0**11)
    want = trace(whole, overflows)
    assert trace(first, overflows[:stop]) == want[:stop]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = DynamicGradScaler()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert trace(again, overflows[stop:]) == want[stop:]
    assert again.state_dict() == whole.state_dict()


def test_loads_upstreams_state():
    scaler = DynamicGradScaler()
    scaler.load_state_dict({"scale": torch.tensor([128.0]), "growth_factor": 4, "backoff_factor": 0.25, "hysteresis": 1})
    assert scaler.value == 128.0 and trace(scaler, [1]) == [32.0]
    assert {"scale", "growth_factor", "backoff_factor", "hysteresis"} <= set(scaler.state_dict())
    with pytest.raises(ValueError, match="needs 'scale'"):
        scaler.load_state_dict({})


@pytest.mark.parametrize(
    "options",
    [
        {"initial_scale": 0},
        {"min_scale": 2.0**17},
        {"min_scale": 0},
        {"max_scale": 2.0},
        {"growth_factor": 1},
        {"backoff_factor": 1},
        {"backoff_factor": 0},
        {"hysteresis": -1},
        {"growth_interval": 0},
    ],
    ids=str,
)
def test_arguments_are_checked(options):
    with pytest.raises(AssertionError, match=next(iter(options))):
        DynamicGradScaler(**options)
