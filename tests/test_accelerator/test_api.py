"""Which accelerator is chosen, and that every one answers the same questions."""

import inspect

import pytest
import torch

from colossalai.accelerator import (
    BaseAccelerator,
    CpuAccelerator,
    CudaAccelerator,
    NpuAccelerator,
    api,
    auto_set_accelerator,
    get_accelerator,
    set_accelerator,
)

pytestmark = pytest.mark.fast

TABLE = [
    (CudaAccelerator, "cuda", "nccl", True),
    (NpuAccelerator, "npu", "hccl", True),
    (CpuAccelerator, "cpu", "gloo", False),
]


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setattr(api, "_current", api._current)


@pytest.mark.parametrize(("kind", "name", "backend", "support_set_device"), TABLE)
def test_attributes(kind, name, backend, support_set_device):
    accelerator = kind()
    assert isinstance(accelerator, BaseAccelerator)
    assert (accelerator.name, accelerator.communication_backend) == (name, backend)
    assert (accelerator.is_synchronous, accelerator.support_set_device) == (False, support_set_device)
    assert name in repr(accelerator)


def test_set_by_name_and_by_object():
    set_accelerator("cpu")
    assert type(get_accelerator()) is CpuAccelerator
    mine = CudaAccelerator()
    set_accelerator(mine)
    assert get_accelerator() is mine


def test_set_refuses_what_it_does_not_know():
    with pytest.raises(KeyError, match="cuda, npu, cpu"):
        set_accelerator("tpu")
    with pytest.raises(TypeError, match="int"):
        set_accelerator(1)


def test_the_first_available_one_is_chosen(monkeypatch):
    monkeypatch.setattr(CudaAccelerator, "is_available", lambda self: False)
    monkeypatch.setattr(NpuAccelerator, "is_available", lambda self: False)
    auto_set_accelerator()
    assert get_accelerator().name == "cpu"
    monkeypatch.setattr(NpuAccelerator, "is_available", lambda self: True)
    auto_set_accelerator()
    assert get_accelerator().name == "npu"
    monkeypatch.setattr(CudaAccelerator, "is_available", lambda self: True)
    auto_set_accelerator()
    assert get_accelerator().name == "cuda"


def test_first_question_chooses(monkeypatch):
    monkeypatch.setattr(api, "_current", None)
    assert get_accelerator().name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_npu_without_its_package_is_absent():
    assert NpuAccelerator().is_available() is False


def public(kind) -> dict[str, list[str]]:
    return {
        name: [p for p in inspect.signature(member).parameters]
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_accelerator_has_the_same_methods_with_the_same_arguments():
    base = public(BaseAccelerator)
    assert len(base) == 40  # the whole list of the public API
    for kind in (CudaAccelerator, NpuAccelerator, CpuAccelerator):
        assert public(kind) == base


def test_device_methods_reach_the_torch_module(monkeypatch):
    """Each method of the CUDA accelerator calls the function of torch.cuda of the same name, with its arguments."""
    calls = []

    class Recording:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs)) or 0

    accelerator = CudaAccelerator()
    monkeypatch.setattr(CudaAccelerator, "module", Recording())
    accelerator.set_device(1)
    accelerator.memory_allocated("cuda:1")
    accelerator.memory_summary(None, True)
    accelerator.set_per_process_memory_fraction(0.5)
    accelerator.reset_max_memory_allocated()
    accelerator.get_rng_state()
    accelerator.Event(True)
    assert calls == [
        ("set_device", (1,), {}),
        ("memory_allocated", ("cuda:1",), {}),
        ("memory_summary", (None, True), {}),
        ("set_per_process_memory_fraction", (0.5, None), {}),
        ("reset_peak_memory_stats", (None,), {}),
        ("get_rng_state", ("cuda",), {}),
        ("Event", (True, False, False), {}),
    ]
    assert accelerator.get_current_device() == torch.device("cuda", 0)


@pytest.mark.gpu
def test_cuda_for_real():
    accelerator = CudaAccelerator()
    held = torch.zeros(1 << 20, device=accelerator.get_current_device())
    assert accelerator.memory_allocated() >= held.numel() * 4
    accelerator.reset_max_memory_allocated()
    accelerator.reset_max_memory_cached()
    assert accelerator.max_memory_allocated() >= held.numel() * 4
    accelerator.manual_seed(5)
    first = torch.rand(3, device="cuda")
    accelerator.manual_seed_all(5)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    with accelerator.stream(accelerator.Stream()):
        start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
        start.record(), held.add_(1), end.record()
    accelerator.synchronize()
    assert start.elapsed_time(end) >= 0.0
    assert accelerator.get_device_properties().total_memory > 0
    assert accelerator.get_device_capability()[0] >= 7
    assert accelerator.get_version() == torch.version.cuda
    with accelerator.autocast(dtype=torch.bfloat16):
        assert torch.nn.Linear(4, 4, device="cuda")(torch.ones(1, 4, device="cuda")).dtype == torch.bfloat16
