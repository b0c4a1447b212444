"""The CPU answers every question a device answers, and raises for none of them."""

import time

import pytest
import torch
from torch import nn

from colossalai.accelerator import CpuAccelerator
from colossalai.accelerator.cpu_accelerator import host_memory_bytes

pytestmark = pytest.mark.fast
cpu = CpuAccelerator()


def test_devices():
    assert cpu.get_current_device() == torch.device("cpu")
    assert (cpu.current_device(), cpu.device_count(), cpu.is_available()) == (0, 1, True)
    assert cpu.set_device() is None and cpu.set_device(0) is None and cpu.synchronize() is None
    assert cpu.get_version() == ""
    assert isinstance(cpu.get_device_name(), str)
    assert cpu.get_device_capability() == (0, 0)
    assert cpu.utilization() == 0


def test_memory_counts_bytes():
    assert cpu.memory_allocated() == cpu.max_memory_allocated() == 0
    before = cpu.memory_reserved()
    held = torch.ones(16 << 20)  # 64 MiB
    assert 48 << 20 < cpu.memory_reserved() - before < 96 << 20
    assert cpu.max_memory_reserved() >= cpu.memory_reserved() - (8 << 20)
    total = host_memory_bytes()
    assert 1 << 28 < total < 1 << 50
    assert cpu.get_device_properties().total_memory == total
    del held
    assert cpu.memory_stats() == {} and cpu.memory_snapshot() == []
    assert "GiB" in cpu.memory_summary()
    for nothing in (
        cpu.empty_cache,
        cpu.reset_peak_memory_stats,
        cpu.reset_max_memory_allocated,
        cpu.reset_max_memory_cached,
    ):
        assert nothing() is None


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_memory_fraction_must_be_one(fraction):
    with pytest.raises(ValueError, match="fraction"):
        cpu.set_per_process_memory_fraction(fraction)


def test_random_numbers():
    cpu.manual_seed(3)
    state, first = cpu.get_rng_state(), torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    cpu.set_rng_state_all([state])
    assert torch.equal(torch.rand(2), first)
    cpu.manual_seed_all(3)
    assert torch.equal(torch.rand(2), first) and cpu.initial_seed() == 3
    assert len(cpu.get_rng_state_all()) == 1
    with pytest.raises(ValueError, match="one generator"):
        cpu.set_rng_state_all([state, state])
    cpu.seed()
    assert cpu.initial_seed() != 3
    cpu.seed_all()
    torch.manual_seed(0)


def test_modules_move():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert cpu.set_to_device(one) is one
    assert cpu.set_to_device([one]) is one
    assert cpu.set_to_device([one, two]) == [one, two]


def test_streams_and_events():
    stream = cpu.Stream()
    assert cpu.set_stream(stream) is None
    with cpu.stream(cpu.current_stream()):
        start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
        start.record()
        time.sleep(0.01)
        end.record(cpu.default_stream())
    end.wait(), end.synchronize()
    assert end.query() and 9.0 < start.elapsed_time(end) < 1000.0  # milliseconds
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(cpu.Event())


def test_autocast_casts():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with cpu.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with cpu.autocast(enabled=False, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32
