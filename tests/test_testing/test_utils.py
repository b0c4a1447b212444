"""Decorators, stand-ins and `spawn`, whose failures are errors and never hangs."""

import os
import random
import socket
import time
import unittest

import numpy as np
import pytest
import torch

from colossalai.testing import (
    DummyDataloader,
    clear_cache_before_run,
    free_port,
    parameterize,
    rerun_if_address_is_in_use,
    rerun_on_exception,
    run_on_environment_flag,
    skip_if_not_enough_gpus,
    spawn,
)
from colossalai.testing.random import seed_all
from colossalai.utils.errors import ConfigError, DisagreementError

fast = pytest.mark.fast


@fast
def test_parameterize_stacks_and_names_the_value():
    seen = []

    @parameterize("a", [1, 2])
    @parameterize("b", ["x", "y"])
    def check(prefix, a, b):
        seen.append((prefix, a, b))
        if a == 2 and b == "y":
            raise ValueError("here")

    with pytest.raises(ValueError) as caught:
        check("p")
    assert seen == [("p", 1, "x"), ("p", 1, "y"), ("p", 2, "x"), ("p", 2, "y")]
    assert not hasattr(caught.value, "__notes__") or caught.value.__notes__ == ["with b='y'", "with a=2"]


@fast
@pytest.mark.parametrize("max_try, calls", [(1, 1), (3, 3), (None, 4)])
def test_rerun_on_exception_counts_its_tries(max_try, calls):
    done = []

    @rerun_on_exception(ValueError, pattern=r"try \d", max_try=max_try)
    def flaky():
        done.append(1)
        if len(done) < 4:
            raise ValueError(f"this is try {len(done)}")
        return "done"

    if max_try is None:
        assert flaky() == "done"
    else:
        with pytest.raises(ValueError):
            flaky()
    assert len(done) == calls


@fast
def test_rerun_only_on_what_was_asked():
    calls = []

    @rerun_on_exception(ValueError, pattern="address")
    def fails(error):
        calls.append(1)
        raise error

    for error in (KeyError("address"), ValueError("something else")):
        with pytest.raises(type(error)):
            fails(error)
    assert len(calls) == 2

    @rerun_if_address_is_in_use()
    def binds():
        calls.append(1)
        if len(calls) < 5:
            raise RuntimeError("bind failed: Address already in use")

    binds()
    assert len(calls) == 5
    with pytest.raises(ConfigError, match="max_try=0"):
        rerun_on_exception(max_try=0)


@fast
def test_small_helpers(monkeypatch):
    port = free_port()
    with socket.socket() as probe:
        probe.bind(("localhost", port))

    numbers = iter(range(100))
    loader = DummyDataloader(lambda: next(numbers), length=3)
    assert len(loader) == 3 and list(loader) == [0, 1, 2] and list(loader) == [3, 4, 5]

    assert clear_cache_before_run()(lambda x: x + 1)(2) == 3
    assert skip_if_not_enough_gpus(0)(lambda: "ran")() == "ran"
    with pytest.raises(unittest.SkipTest, match="100000 GPUs"):
        skip_if_not_enough_gpus(100000)(lambda: "ran")()

    monkeypatch.setenv("SOME_FLAG", "1")
    assert run_on_environment_flag("SOME_FLAG").args == (False,)
    monkeypatch.setenv("SOME_FLAG", "off")
    assert run_on_environment_flag("SOME_FLAG").args == (True,)
    with pytest.raises(ConfigError):
        run_on_environment_flag("")


@fast
def test_seed_all_seeds_every_generator():
    draws = []
    for _ in range(2):
        seed_all(7)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    seed_all(8, cuda_deterministic=True)
    assert torch.rand(1).item() != draws[0][2] and torch.backends.cudnn.deterministic
    seed_all(8)
    assert not torch.backends.cudnn.deterministic


def write_rank(rank, world_size, port, folder):
    with open(os.path.join(folder, f"{rank}of{world_size}"), "w") as file:
        file.write(str(port))


def fail_on_one(rank, world_size, port, how):
    if rank == 1:
        if how == "raise":
            raise ValueError("rank one is unhappy")
        os._exit(17)
    time.sleep(600)


def test_spawn_gives_rank_world_size_and_port(tmp_path):
    spawn(write_rank, nprocs=2, folder=str(tmp_path))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["0of2", "1of2"]
    assert len({file.read_text() for file in files}) == 1


def test_spawn_shows_the_childs_error_and_ends_the_others():
    begin = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank one is unhappy"):
        spawn(fail_on_one, nprocs=2, how="raise")
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="exit code 17"):
        spawn(fail_on_one, nprocs=2, how="exit")
    assert time.monotonic() - begin < 120


def test_spawn_waits_no_longer_than_its_limit(monkeypatch):
    monkeypatch.setenv("COLOSSALAI_TIMEOUT", "3")
    begin = time.monotonic()
    with pytest.raises(DisagreementError, match=r"fail_on_one was still running on ranks \[0\] of 1 after 3 s"):
        spawn(fail_on_one, nprocs=1, how="raise")
    assert time.monotonic() - begin < 60
    with pytest.raises(ConfigError, match="nprocs=0"):
        spawn(fail_on_one, nprocs=0)
