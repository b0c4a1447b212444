"""The small helpers."""

import random
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from colossalai import utils
from colossalai.utils.errors import ConfigError

pytestmark = pytest.mark.fast


def test_current_device():
    assert utils.get_current_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("seed", [0, 1024, 2**40])
def test_set_seed(seed):
    def draw():
        utils.set_seed(seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


def test_ensure_path_exists(tmp_path):
    utils.ensure_path_exists(str(tmp_path / "a" / "b" / "file"))
    utils.ensure_path_exists(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir() and not (tmp_path / "a" / "b" / "file").exists()


def test_conditional_context():
    entered = []

    @contextmanager
    def manager():
        entered.append(True)
        yield 3
        entered.append(False)

    with utils.conditional_context(manager()) as value:
        assert value == 3 and entered == [True]
    with utils.conditional_context(manager(), enable=False) as value:
        assert value is None
    assert entered == [True, False]


def test_is_ddp_ignored():
    p = nn.Parameter(torch.ones(1))
    assert utils.is_ddp_ignored(p) is False
    p._ddp_to_ignore = True
    assert utils.is_ddp_ignored(p) is True


def test_disposable_runs_once_also_when_it_gives_none():
    calls = []

    @utils.disposable
    def once(x):
        calls.append(x)
        return x

    assert (once(1), once(2), calls, once.__name__) == (1, None, [1], "once")


def test_free_storage_leaves_views_alone():
    whole = torch.ones(4)
    view = whole[1:]
    utils.free_storage(view)
    assert whole.untyped_storage().size() == 16
    utils.free_storage(whole)
    utils.free_storage(whole)
    assert whole.untyped_storage().size() == 0 and whole.shape == (4,)


def test_cast_float():
    Pair = namedtuple("Pair", "x y")
    ints = torch.ones(1, dtype=torch.int64)
    nest = {"a": [torch.ones(1), ints], "b": (torch.ones(1).double(), "text"), "c": Pair(torch.ones(1), 2)}
    cast = utils._cast_float(nest, torch.bfloat16)
    assert cast["a"][0].dtype == cast["b"][0].dtype == cast["c"].x.dtype == torch.bfloat16
    assert cast["a"][1] is ints and cast["b"][1] == "text" and cast["c"].y == 2
    assert type(cast["b"]) is tuple and type(cast["c"]) is Pair


def test_non_persistent_buffers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("left", torch.ones(1), persistent=False)

    model = nn.Sequential(Block(), nn.Sequential(Block()))
    assert utils.get_non_persistent_buffers_set(model) == {"0.left", "1.0.left"}
    assert utils.get_non_persistent_buffers_set(model[0]) == {"left"}
    assert utils.get_non_persistent_buffers_set(model[0], prefix="x") == {"x.left"}
    shared = nn.Sequential(model[0], model[0])
    assert utils.get_non_persistent_buffers_set(shared) == {"0.left"}
    assert utils.get_non_persistent_buffers_set(shared, remove_duplicate=False) == {"0.left", "1.left"}


def test_memory_helpers():
    capacity = utils.colo_device_memory_capacity(torch.device("cpu"))
    assert capacity == utils.colo_get_cpu_memory_capacity() > 1 << 28
    assert 0 < utils.colo_device_memory_used("cpu") < capacity
    before = utils.memory._cpu_capacity
    try:
        utils.colo_set_cpu_memory_capacity(1 << 30)
        assert utils.colo_device_memory_capacity("cpu") == 1 << 30
    finally:
        utils.memory._cpu_capacity = before
    with pytest.raises(ConfigError, match="size=0"):
        utils.colo_set_cpu_memory_capacity(0)
    from colossalai.legacy.utils.memory import colo_device_memory_capacity

    assert colo_device_memory_capacity is utils.colo_device_memory_capacity


def test_multi_tensor_applier():
    seen = []
    result = utils.multi_tensor_applier(lambda *args: seen.append(args) or "done", "flag", [[1], [2]], 3)
    assert result == "done" and seen == [(2048 * 32, "flag", [[1], [2]], 3)] and utils.multi_tensor_applier.available


def test_tensor_detector(tmp_path, capsys):
    model = nn.Linear(3, 2)
    detector = utils.TensorDetector(include_cpu=True, module=model)
    detector.detect()
    assert "weight: cpu, float32, shape (2, 3), grad True, 24 bytes" in capsys.readouterr().out
    extra = torch.ones(5, 7)
    model(torch.ones(1, 3)).sum().backward()
    report = detector.detect()
    assert "+ 1 x Tensor: cpu, float32, shape (5, 7), grad False, 140 bytes" in report
    assert "weight.grad: cpu, float32, shape (2, 3), grad False, 24 bytes" in report
    del extra
    assert "- 1 x Tensor: cpu, float32, shape (5, 7)" in detector.detect()
    utils.TensorDetector(log=str(tmp_path / "log"), include_cpu=True, module=model).detect()
    assert "weight" in (tmp_path / "log").read_text()
    assert "weight" not in utils.TensorDetector(show_info=False, module=model).detect() or torch.cuda.is_available()
