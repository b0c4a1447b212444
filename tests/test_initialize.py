"""Joining a world: every way to start, and every way it can go wrong within its time limit."""

import contextlib
import io
import os
import random
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.cluster import DistCoordinator
from colossalai.initialize import _slurm_start
from colossalai.utils.errors import ConfigError
from colossalai.utils.limits import group_timeout, rendezvous_timeout
from colossalai.utils.slurm import slurm_hosts, slurm_port
from tests.harness.fresh import failed, run_fresh

WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def bare(monkeypatch):
    """No variable of any launcher, as in a plain shell."""
    for name in list(os.environ):
        if name in WORLD or name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "COLOSSALAI_")):
            monkeypatch.delenv(name)
    return monkeypatch


def report() -> dict:
    """What a launched process sees, after one all-reduce over everybody."""
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    coordinator = DistCoordinator()
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "total": total.item(),
        "local_rank": coordinator.local_rank,
        "node_master": coordinator.local_rank >= 0 and coordinator.is_node_master(),
        "draws": (random.random(), float(np.random.rand()), torch.rand(1).item()),
    }


def start_and_report(how: str, times: int = 1, **kwargs) -> dict:
    for _ in range(times):
        getattr(colossalai, how)(**kwargs)
    return report()


def start_barrier_alone(**kwargs) -> None:
    colossalai.launch(**kwargs)
    if kwargs["rank"] == 0:
        dist.barrier()


def start_leave_start(**kwargs) -> dict:
    colossalai.launch_from_torch(**kwargs)
    dist.destroy_process_group()
    colossalai.launch_from_torch(**kwargs)
    return report()


def start_with_another_backend() -> list[str]:
    colossalai.launch_from_torch(verbose=False)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        colossalai.launch_from_torch(verbose=False)
        colossalai.launch_from_torch(backend="cpu:gloo", verbose=False)
    return said.getvalue().splitlines()


def start_another_world() -> None:
    colossalai.launch_from_torch()
    colossalai.launch(0, 2, "127.0.0.1", 1)


def env_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    return dict(zip(WORLD, map(str, (rank, rank, world_size, "127.0.0.1", port)), strict=True))


# Starting.


@pytest.mark.fast
def test_world_of_one_without_environment():
    (seen,) = run_fresh([(start_and_report, {"how": "launch_from_torch", "seed": 7}, {})])
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    draws = (random.random(), float(np.random.rand()), torch.rand(1).item())
    assert seen == {
        "rank": 0, "world_size": 1, "backend": "gloo", "total": 1.0, "local_rank": 0, "node_master": True,
        "draws": draws,
    }  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("backend", ["gloo", "nccl", None])
def test_c7_backend_is_honoured_and_nccl_means_the_accelerators_own(backend):
    if torch.cuda.is_available() and backend != "gloo":
        pytest.skip("on CUDA nccl is the accelerator's own")
    port = free_port()
    kwargs = {"how": "launch_from_torch", "backend": backend, "seed": 3}
    seen = run_fresh([(start_and_report, kwargs, env_of(rank, 2, port)) for rank in range(2)])
    assert [one["rank"] for one in seen] == [0, 1]
    assert [one["local_rank"] for one in seen] == [0, 1]
    assert [one["node_master"] for one in seen] == [True, False]
    assert all(one["backend"] == "gloo" and one["world_size"] == 2 and one["total"] == 3.0 for one in seen)
    assert seen[0]["draws"] == seen[1]["draws"]  # the same seed on every rank


def test_launch_by_hand_keeps_the_local_rank_it_was_told():
    port = free_port()
    seen = run_fresh(
        [
            (
                start_and_report,
                dict(how="launch", rank=r, world_size=2, host="localhost", port=port, local_rank=1 - r),
                {},
            )
            for r in range(2)
        ]
    )
    assert [one["local_rank"] for one in seen] == [1, 0]
    assert [one["node_master"] for one in seen] == [False, True]


def test_launch_over_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    seen = run_fresh([(start_and_report, dict(how="launch", rank=r, world_size=2, host="::1", port=port), {}) for r in range(2)])
    assert [one["total"] for one in seen] == [3.0, 3.0]


def test_c10_slurm_derives_master_and_ranks(bare):
    job = {"SLURM_NODELIST": "n[01-02]", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}
    starts = [_slurm_start(None, None, job | {"SLURM_PROCID": str(r), "SLURM_LOCALID": "0"}) for r in range(2)]
    assert [(s.rank, s.world_size, s.local_rank, s.host, s.port) for s in starts] == [
        (0, 2, 0, "n01", 20000 + 123456 % 20000),
        (1, 2, 0, "n01", 20000 + 123456 % 20000),
    ]
    given = _slurm_start("head", 7, job | {"SLURM_PROCID": "1"})
    assert (given.host, given.port, given.local_rank) == ("head", 7, None)
    named = _slurm_start(None, None, job | {"SLURM_PROCID": "0", "MASTER_ADDR": "head", "MASTER_PORT": "9"})
    assert (named.host, named.port) == ("head", 9)
    older = {"SLURM_NPROCS": "4", "SLURM_PROCID": "3", "SLURM_JOB_NODELIST": "a1"}
    assert _slurm_start(None, None, older).world_size == 4


def test_c10_slurm_two_processes_meet():
    port, job = free_port(), {"SLURM_NODELIST": "n[01-02]", "SLURM_NPROCS": "2"}
    seen = run_fresh(
        [
            (
                start_and_report,
                {"how": "launch_from_slurm", "host": "127.0.0.1", "port": port},
                job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"},
            )
            for rank in range(2)
        ]
    )
    assert [(one["rank"], one["local_rank"], one["total"]) for one in seen] == [(0, 0, 3.0), (1, 0, 3.0)]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-02]", ["n01", "n02"]),
        ("single", ["single"]),
        ("a,b-[1,3-4],c", ["a", "b-1", "b-3", "b-4", "c"]),
        ("r[1-2]n[08-10]x", ["r1n08x", "r1n09x", "r1n10x", "r2n08x", "r2n09x", "r2n10x"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
    ],
)
def test_slurm_hosts(text, hosts):
    assert slurm_hosts(text) == hosts


@pytest.mark.fast
@pytest.mark.parametrize("text", ["", "n[01-", "n[a-b]", "n]1"])
def test_slurm_hosts_says_what_it_cannot_read(text):
    with pytest.raises(ConfigError, match="node list"):
        slurm_hosts(text)


@pytest.mark.fast
def test_slurm_port_is_a_port_for_any_job():
    for job in ("1", "99999999999", "x", ""):
        assert 20000 <= slurm_port({"SLURM_JOB_ID": job, "SLURM_STEP_ID": "4294967291"}) < 40000
    assert slurm_port({"SLURM_JOB_ID": "5"}) != slurm_port({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"})


def test_openmpi():
    port = free_port()
    seen = run_fresh(
        [
            (
                start_and_report,
                {"how": "launch_from_openmpi", "host": "127.0.0.1", "port": port},
                {f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": str(r), "SIZE": "2", "LOCAL_RANK": str(r)}.items()},
            )
            for r in range(2)
        ]
    )
    assert [(one["rank"], one["local_rank"], one["total"]) for one in seen] == [(0, 0, 3.0), (1, 1, 3.0)]


def test_launch_under_an_elastic_agent_and_again_after_leaving():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    seen = run_fresh([(start_leave_start, {}, env_of(rank, 2, store.port) | agent) for rank in range(2)])
    assert [one["total"] for one in seen] == [3.0, 3.0]


@pytest.mark.fast
def test_launch_again_only_seeds_again():
    (seen,) = run_fresh([(start_and_report, {"how": "launch_from_torch", "times": 2, "seed": 11}, {})])
    torch.manual_seed(11)
    assert seen["draws"][2] == torch.rand(1).item()


@pytest.mark.fast
def test_launch_again_warns_that_another_backend_is_not_used():
    (said,) = run_fresh([(start_with_another_backend, {}, {})])
    assert len(said) == 2 and "joined its world already, over gloo; cpu:gloo is not used" in said[1]


# What can go wrong.


@pytest.mark.fast
def test_joining_another_world_is_refused():
    (result,) = run_fresh([(start_another_world, {}, {})])
    assert "rank 0 of 1 already" in failed(result, "ConfigError")


@pytest.mark.fast
@pytest.mark.parametrize("missing", WORLD)
def test_partly_set_environment_names_what_is_missing(bare, missing):
    for name, value in env_of(0, 1, 29500).items():
        if name != missing:
            bare.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"variable {missing} is missing"):
        colossalai.launch_from_torch()


@pytest.mark.fast
def test_environment_that_is_no_number(bare):
    for name, value in env_of(0, 1, 29500).items():
        bare.setenv(name, value)
    bare.setenv("WORLD_SIZE", "two")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 'two', not an integer"):
        colossalai.launch_from_torch()


@pytest.mark.fast
@pytest.mark.parametrize(("how", "name"), [("launch_from_slurm", "SLURM_PROCID"), ("launch_from_openmpi", "OMPI_COMM_WORLD_RANK")])
def test_other_launchers_name_what_is_missing(bare, how, name):
    with pytest.raises(RuntimeError, match=f"{how}: the environment variable {name} is missing"):
        getattr(colossalai, how)()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"rank": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"port": 70000}, "port=70000"),
        ({"port": None}, "port=None"),
        ({"host": None}, "host=None"),
        ({"local_rank": -3}, "local_rank=-3"),
        ({"backend": "smoke"}, "backend='smoke'"),
    ],
)
def test_launch_names_the_wrong_argument(bare, wrong, name):
    given = {"rank": 0, "world_size": 2, "host": "127.0.0.1", "port": 29500} | wrong
    with pytest.raises(ConfigError, match=name):
        colossalai.launch(**given)


@pytest.mark.fast
def test_c10_wrong_port_is_an_error_in_time():
    port = free_port()
    call = dict(how="launch", rank=1, world_size=2, host="127.0.0.1", port=port)
    (result,) = run_fresh([(start_and_report, call, {"COLOSSALAI_TIMEOUT": "2"})])
    text = failed(result, "RuntimeError")
    assert f"found nobody at 127.0.0.1:{port} within 2 s" in text and "COLOSSALAI_TIMEOUT" in text
    assert result[2] < 10
    assert rendezvous_timeout().total_seconds() < 60  # and without the variable


@pytest.mark.fast
def test_unknown_host_is_an_error_in_time():
    call = dict(how="launch", rank=1, world_size=2, host="no-such-host.invalid", port=29500)
    (result,) = run_fresh([(start_and_report, call, {"COLOSSALAI_TIMEOUT": "2"})])
    assert "no-such-host.invalid:29500" in failed(result, "RuntimeError")
    assert result[2] < 20


@pytest.mark.fast
def test_world_size_too_large_names_the_ranks_that_did_not_come():
    port = free_port()
    calls = [(start_and_report, dict(how="launch", rank=r, world_size=4, host="127.0.0.1", port=port),
              {"COLOSSALAI_TIMEOUT": "3"}) for r in (0, 2)]  # fmt: skip
    for result in run_fresh(calls):
        text = failed(result, "RuntimeError")
        assert "4 processes were expected, and rank(s) 1, 3 did not come at 127.0.0.1" in text and "within 3 s" in text
        assert result[2] < 15


@pytest.mark.fast
def test_ranks_that_disagree_on_the_world_size():
    port = free_port()
    results = run_fresh(
        [
            (
                start_and_report,
                dict(how="launch", rank=r, world_size=size, host="127.0.0.1", port=port),
                {"COLOSSALAI_TIMEOUT": "5"},
            )
            for r, size in ((0, 2), (1, 3))
        ]
    )
    for result in results:
        assert "disagree on world_size: rank 0 says 2, rank 1 says 3" in failed(result, "RuntimeError")


@pytest.mark.fast
def test_two_processes_of_one_rank():
    port = free_port()
    calls = [(start_and_report, dict(how="launch", rank=r, world_size=3, host="127.0.0.1", port=port),
              {"COLOSSALAI_TIMEOUT": "3"}) for r in (0, 1, 1)]  # fmt: skip
    results = run_fresh(calls)
    for result in results:
        assert "two processes say they are rank 1" in failed(result, "RuntimeError")
        assert result[2] < 15


@pytest.mark.fast
def test_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        call = dict(how="launch", rank=0, world_size=2, host="127.0.0.1", port=taken.getsockname()[1])
        (result,) = run_fresh([(start_and_report, call, {"COLOSSALAI_TIMEOUT": "3"})])
    text = failed(result, "RuntimeError")
    assert "cannot open 127.0.0.1" in text and "ddress already in use" in text  # the words testing.rerun looks for


@pytest.mark.fast
def test_a_rank_that_stays_away_from_a_collective_ends_the_wait():
    port = free_port()
    calls = [(start_barrier_alone, dict(rank=r, world_size=2, host="127.0.0.1", port=port, verbose=False),
              {"COLOSSALAI_TIMEOUT": "2"}) for r in range(2)]  # fmt: skip
    waiting, away = run_fresh(calls)
    assert away is None
    assert failed(waiting, "RuntimeError") and waiting[2] < 15


@pytest.mark.fast
def test_timeout_variable(bare):
    assert (group_timeout().total_seconds(), rendezvous_timeout().total_seconds()) == (600.0, 50.0)
    bare.setenv("COLOSSALAI_TIMEOUT", "7.5")
    assert (group_timeout().total_seconds(), rendezvous_timeout().total_seconds()) == (7.5, 7.5)
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        bare.setenv("COLOSSALAI_TIMEOUT", wrong)
        with pytest.raises(ConfigError, match="COLOSSALAI_TIMEOUT"):
            group_timeout()
    bare.delenv("COLOSSALAI_TIMEOUT")
    bare.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous_timeout().total_seconds() == 300.0
