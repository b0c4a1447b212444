"""The worker pool: results by rank, and every way a worker can fail is seen, named and survived."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import CaseFailure, WorkerFailure, get_pool, run_cases, run_workers
from tests.harness.limits import TimeLimitExceeded, time_limit

pytestmark = pytest.mark.fast


def add_ranks(rank, world_size, bias):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return rank, world_size, total.item() + bias, torch.get_num_threads(), os.getpid()


def misbehave(rank, world_size, how, which=1):
    if rank == which:
        if how == "raise":
            raise KeyError("lost its key")
        if how == "die":
            os.abort()
        if how == "hang":
            time.sleep(1000)
    if how in ("raise", "die"):
        dist.barrier()
    return "fine"


def mismatched_reduce(rank, world_size):
    """gloo does not compare sizes: one rank is aborted, with no exception anywhere in it."""
    dist.all_reduce(torch.ones(1000 + 5000 * rank))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank_and_processes_stay(world_size):
    first = run_workers(world_size, add_ranks, bias=10)
    second = run_workers(world_size, add_ranks, bias=20)
    ranks = sum(range(world_size))
    assert [r[:4] for r in first] == [(rank, world_size, 10 + ranks, 1) for rank in range(world_size)]
    assert [r[2] for r in second] == [20 + ranks] * world_size
    assert [r[4] for r in first] == [r[4] for r in second]


def test_an_exception_comes_back_with_rank_case_and_traceback():
    with pytest.raises(WorkerFailure, match="KeyError: 'lost its key'") as caught:
        run_workers(2, misbehave, how="raise")
    failure = caught.value.failure
    assert (failure.kind, failure.rank, failure.error, failure.case) == ("raised", 1, "KeyError", "misbehave")
    assert "in misbehave" in failure.report and "still running" in failure.report
    assert run_workers(2, misbehave, how="no") == ["fine"] * 2


def test_a_killed_worker_is_named_with_its_exit_code():
    with pytest.raises(WorkerFailure, match=r"rank 1 died with exit code -6 \(SIGABRT\)") as caught:
        run_workers(2, misbehave, how="die")
    assert caught.value.failure.exitcodes == {1: -6}
    assert run_workers(2, misbehave, how="no") == ["fine"] * 2


def test_a_gloo_abort_is_a_failure_and_not_a_hang():
    begin = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        run_workers(2, mismatched_reduce, timeout=20)
    assert caught.value.failure.kind in ("died", "raised")
    assert time.monotonic() - begin < 30


def test_a_hang_ends_at_its_limit_with_the_stack_that_hung():
    begin = time.monotonic()
    with pytest.raises(WorkerFailure, match="still running after 2 s: rank 0") as caught:
        run_workers(2, misbehave, timeout=2, how="hang", which=0)
    assert time.monotonic() - begin < 10
    assert caught.value.failure.kind == "timeout" and "in misbehave" in caught.value.failure.report


def test_one_failing_case_does_not_take_the_others_along():
    cases = {"a": {"how": "no"}, "b": {"how": "raise"}, "c": {"how": "no"}, "d": {"how": "die"}, "e": {"how": "no"}}
    results = run_cases(2, misbehave, cases)
    assert [results[name] for name in "ace"] == [["fine"] * 2] * 3
    assert [(type(results[name]), results[name].kind, results[name].case) for name in "bd"] == [
        (CaseFailure, "raised", "b"),
        (CaseFailure, "died", "d"),
    ]


def test_few_pools_keep_processes():
    for world_size in (1, 2, 3):
        run_workers(world_size, misbehave, how="no")
    assert get_pool(3)._ranks and get_pool(2)._ranks and not get_pool(1)._ranks


def test_the_time_limit_stops_a_waiting_test():
    begin = time.monotonic()
    with pytest.raises(TimeLimitExceeded, match="sleeper ran longer than 0.2 s"), time_limit(0.2, "sleeper"):
        time.sleep(30)
    assert time.monotonic() - begin < 5
