"""Choosing among extensions."""

from types import SimpleNamespace

import pytest
from colossalai.kernel.extensions import _Extension

from colossalai.kernel.kernel_loader import CPUAdamLoader, KernelLoader
from colossalai.utils.errors import ConfigError

pytestmark = pytest.mark.fast


def make(name, available=True, priority=1, compatible=True, built=None):
    class Extension(_Extension):
        def __init__(self):
            super().__init__(name, support_aot=False, support_jit=False, priority=priority)

        def is_available(self):
            return available

        def assert_compatible(self):
            if not compatible:
                raise RuntimeError(f"{name} is not compatible")

        def build_aot(self):
            raise AssertionError

        def build_jit(self):
            return SimpleNamespace(name=name)

        def find_built(self):
            return built

    return Extension


def loader(*kinds):
    class Loader(KernelLoader):
        REGISTRY = list(kinds)

    return Loader()


def test_highest_priority_of_those_available(capsys):
    kinds = make("slow"), make("fast", priority=10), make("absent", available=False, priority=99)
    assert loader(*kinds).load().name == "fast"
    assert "slow, fast all fit; taking fast" in capsys.readouterr().err
    assert loader(kinds[0]).load().name == "slow"
    assert capsys.readouterr().err == ""


def test_by_name_availability_is_not_asked():
    one = loader(make("a"), make("b", available=False, compatible=False))
    assert one.load("b").name == "b"
    with pytest.raises(ConfigError, match="ext_name='c': Loader has no such extension; it has a, b"):
        one.load("c")


def test_none_fits():
    with pytest.raises(AssertionError, match="no extension fits this machine; it has a"):
        loader(make("a", available=False)).load()
    with pytest.raises(AssertionError, match="it has none"):
        loader().load()


def test_each_available_one_must_be_compatible():
    with pytest.raises(RuntimeError, match="b is not compatible"):
        loader(make("a", priority=2), make("b", compatible=False)).load()


def test_registering_is_for_one_loader_only():
    one, other = loader(make("a")), loader()
    extra = make("b")
    type(one).register_extension(extra)
    type(one).register_extension(extra)
    assert [kind().name for kind in one.REGISTRY] == ["a", "b"] and other.REGISTRY == [] == KernelLoader.REGISTRY


def test_loaded_once():
    one = loader(make("a"))
    assert one.load() is one.load() is one.load_if_built()


def test_load_if_built_builds_nothing():
    assert loader(make("a")).load_if_built() is None
    built = SimpleNamespace(name="built")
    assert loader(make("a", priority=5), make("b", built=built)).load_if_built() is built


def test_cpu_adam_is_registered():
    assert [kind().name for kind in CPUAdamLoader.REGISTRY] == ["cpu_adam_x86", "cpu_adam_arm"]
