"""The coordinator on real ranks."""

import time

import pytest
import torch.distributed as dist

from colossalai.cluster import DistCoordinator
from colossalai.cluster.local_rank import local_rank, remember_local_rank
from colossalai.context import SingletonMeta
from colossalai.utils.errors import ConfigError


@pytest.mark.fast
def test_it_needs_a_world():
    SingletonMeta._instances.pop(DistCoordinator, None)
    with pytest.raises(AssertionError, match="launch_from_torch"):
        DistCoordinator()


@pytest.mark.fast
def test_local_rank_from_environment_then_from_launch(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3
    monkeypatch.delenv("LOCAL_RANK")
    remember_local_rank(None)
    assert local_rank() == -1
    remember_local_rank(2)
    assert local_rank() == 2
    remember_local_rank(None)


def look(rank, world_size):
    coordinator = DistCoordinator()
    pair = dist.new_group([1, 2])
    try:
        DistCoordinator(1)
        refused = False
    except AssertionError:
        refused = True
    ran = coordinator.on_master_only()(lambda x: x + 1)(rank)
    return {
        "same": DistCoordinator() is coordinator,
        "refused": refused,
        "public": (coordinator.rank, coordinator.world_size, coordinator.local_rank),
        "private": (coordinator._rank, coordinator._world_size, coordinator._local_rank),
        "master": coordinator.is_master(),
        "node_master": coordinator.is_node_master(),
        "last": coordinator.is_last_process(),
        "master_of_pair": rank in (1, 2) and coordinator.is_master(pair),
        "last_of_pair": rank in (1, 2) and coordinator.is_last_process(pair),
        "ran": ran,
    }


def test_ranks(workers):
    for rank, one in enumerate(workers(3).run(look)):
        assert one == {
            "same": True, "refused": True, "public": (rank, 3, rank), "private": (rank, 3, rank), "master": rank == 0,
            "node_master": rank == 0, "last": rank == 2, "master_of_pair": rank == 1, "last_of_pair": rank == 2,
            "ran": 1 if rank == 0 else None,
        }  # fmt: skip


def one_goes_first(rank, world_size, executor, fails):
    coordinator = DistCoordinator()
    try:
        with coordinator.priority_execution(executor):
            entered = time.time()
            if rank == executor:
                time.sleep(0.3)
                if fails:
                    raise KeyError("the work went wrong")
            left = time.time()
    except KeyError:
        left = time.time()
    coordinator.block_all()
    return entered, left


@pytest.mark.parametrize(("executor", "fails"), [(0, False), (1, False), (1, True)])
def test_priority_execution(workers, executor, fails):
    times = workers(2).run(one_goes_first, executor=executor, fails=fails)
    assert times[1 - executor][0] >= times[executor][1] - 1e-3


def wrong_executor(rank, world_size):
    with DistCoordinator().priority_execution(2):
        pass


def test_priority_execution_names_a_rank_that_is_not_there(workers):
    from tests.harness.pool import WorkerFailure

    with pytest.raises(WorkerFailure, match="executor_rank=2"):
        workers(2).run(wrong_executor)


def printed(rank, world_size):
    import contextlib
    import io
    import os

    coordinator, out = DistCoordinator(), io.StringIO()
    kept = os.environ.pop("LOCAL_RANK")
    remember_local_rank(None)
    try:
        with contextlib.redirect_stdout(out):
            coordinator.print_on_master("master")
            coordinator.print_on_node_master("node")
    except ConfigError as error:
        return out.getvalue(), str(error)
    finally:
        os.environ["LOCAL_RANK"] = kept
    return out.getvalue(), ""


def test_printing_and_unknown_local_rank(workers):
    (first, error), (second, _) = workers(2).run(printed)
    assert (first, second) == ("master\n", "")
    assert "print_on_node_master" in error and "LOCAL_RANK" in error
