"""Configs and singletons."""

import threading
import time

import pytest

from colossalai.context import Config, ConfigException, SingletonMeta
from colossalai.context.config import Config as SameConfig

pytestmark = pytest.mark.fast


def test_config_has_attributes_at_every_depth():
    config = Config({"a": 1, "b": {"c": {"d": 2}}})
    assert config.a == config["a"] == 1 and config.b.c.d == 2 and isinstance(config.b, Config)
    config.e = {"f": 3}
    config._add_item("g", 4)
    config.update({"a": 5, "h": {"i": 6}})
    assert (config.e.f, config.g, config.a, config.h.i) == (3, 4, 5, 6)
    del config.g
    assert "g" not in config and dict(config)["a"] == 5
    assert SameConfig is Config and Config() == {}


def test_config_says_what_it_lacks():
    with pytest.raises(AttributeError, match="no entry 'lr'; it has a, b"):
        Config({"a": 1, "b": 2}).lr  # noqa: B018
    with pytest.raises(AttributeError, match="no entry 'lr'"):
        del Config().lr
    with pytest.raises(ConfigException, match="dictionary, not list"):
        Config().update([1])


def test_config_from_file(tmp_path):
    file = tmp_path / "settings.py"
    file.write_text("import os\nfrom pathlib import Path\nBATCH = 2 ** 3\nmodel = dict(depth=BATCH)\n_hidden = 1\n")
    config = Config.from_file(str(file))
    assert config.BATCH == 8 and config.model.depth == 8 and "os" not in config and "_hidden" not in config
    with pytest.raises(FileNotFoundError, match="nowhere.py"):
        Config.from_file(tmp_path / "nowhere.py")
    other = tmp_path / "settings.yaml"
    other.write_text("")
    with pytest.raises(AssertionError, match="only .py"):
        Config.from_file(other)


def test_singleton():
    class One(metaclass=SingletonMeta):
        def __init__(self, value=0):
            self.value = value

    one = One(3)
    assert One() is one and one.value == 3
    with pytest.raises(AssertionError, match="One exists already"):
        One(4)
    with pytest.raises(AssertionError, match="One exists already"):
        One(value=4)


def test_singleton_is_made_once_by_many_threads():
    made = []

    class Slow(metaclass=SingletonMeta):
        def __init__(self):
            time.sleep(0.05)
            made.append(self)

    threads = [threading.Thread(target=Slow) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(made) == 1


def test_singleton_that_makes_another():
    class Inner(metaclass=SingletonMeta):
        pass

    class Outer(metaclass=SingletonMeta):
        def __init__(self):
            self.inner = Inner()

    assert Outer().inner is Inner()
