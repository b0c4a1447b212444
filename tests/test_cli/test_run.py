"""``colossalai run`` as a user meets it: real processes, real exit codes."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from colossalai.cli import cli
from colossalai.cli.launcher.command import free_port
from colossalai.cli.launcher.run import make_job

ROOT = Path(__file__).resolve().parents[2]
NOTE = textwrap.dedent(
    """
    import json, os, sys
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"]
    note = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "module": __spec__ is not None}
    with open(os.path.join(os.environ["COLOSSALAI_TEST_NOTES"], "rank" + os.environ["RANK"]), "w") as file:
        json.dump(note, file)
    """
)


@pytest.fixture
def work(tmp_path):
    """A folder for scripts, and the environment the command line runs in."""
    notes = tmp_path / "notes"
    notes.mkdir()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "COLOSSALAI_TEST_NOTES": str(notes),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return tmp_path, env


def start(work, *argv, **more):
    folder, env = work
    command = [sys.executable, "-m", "colossalai.cli", "run", *argv]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, seconds=200):
    """Output, error output, exit code. Stops the job if it outlives its time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=60)
        pytest.fail(f"still running after {seconds} s\n{out}\n{err}")
    return out, err, process.returncode


def notes_of(work):
    return [json.loads(path.read_text()) for path in sorted((work[0] / "notes").iterdir())]


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    "argv, message",
    [
        (["train.py"], "--nproc_per_node is missing"),
        (["--nproc_per_node", "2"], "nothing to run"),
        (["--nproc_per_node", "2", "train.txt"], "must end in .py"),
        (["--nproc_per_node", "2", "-m", "train.py"], "-m train.py"),
        (["--nproc_per_node", "2", "nowhere.py"], "nowhere.py does not exist"),
        (["--nproc_per_nod", "2", "train.py"], "--nproc_per_nod"),
        (["--nproc_per_node", "0", "train.py"], "--nproc_per_node 0"),
        (["--nproc_per_node", "2", "--hostfile", "nowhere.txt", "train.py"], "nowhere.txt cannot be read"),
        (["--nproc_per_node", "2", "--hostfile", "twice.txt", "train.py"], "twice.txt, line 2"),
        (["--nproc_per_node", "2", "--hostfile", "one.txt", "--host", "a", "train.py"], "--host and --hostfile"),
        (
            ["--nproc_per_node", "2", "--hostfile", "one.txt", "--include", "a", "--exclude", "a", "train.py"],
            "--include and --exclude",
        ),
        (["--nproc_per_node", "2", "--hostfile", "one.txt", "--include", "b", "train.py"], "b not found"),
        (["--nproc_per_node", "2", "--num_nodes", "3", "train.py"], "--num_nodes 3"),
        (["--nproc_per_node", "2", "--extra_launch_args", "a b=1", "train.py"], "--extra_launch_args"),
        (["--nproc_per_node", "2", "--master_port", "70000", "train.py"], "--master_port"),
    ],
)
def test_c8_wrong_use_is_a_message_and_a_failure(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "one.txt").write_text("a\n")
    (tmp_path / "twice.txt").write_text("a\na\n")
    result = CliRunner().invoke(cli, ["run", *argv])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_wrong_use_fails_from_the_shell_too(work):
    _, err, code = finish(start(work, "--nproc_per_node", "2", "--hostfile", "nowhere.txt", "train.py"))
    assert code == 1 and "--hostfile nowhere.txt cannot be read" in err


# ---------------------------------------------------------------- what it understands


def parsed(*argv):
    """The job made of a command line."""
    context = cli.commands["run"].make_context("run", list(argv))
    return make_job(context.params)[0]


def test_everything_after_the_script_is_the_scripts():
    job = parsed("--nproc_per_node", "2", "train.py", "--host", "x", "--nproc_per_node", "9", "--", "-m", "--help")
    assert job.nproc == "2" and job.program == "train.py"
    assert job.args == ("--host", "x", "--nproc_per_node", "9", "--", "-m", "--help")


def test_options_of_the_0_5_command_line():
    job = parsed("-host", "localhost,127.0.0.1", "--master_port=1234", "--nproc_per_node", "4", "--ssh-port", "22", "t.py")
    assert [host.name for host in job.hosts] == ["localhost", "127.0.0.1"]
    assert (job.master_port, job.nproc, job.ssh_port, job.master_addr) == (1234, "4", 22, "127.0.0.1")
    assert [host.name for host in parsed("-H", "h1,h2", "--nproc_per_node", "1", "t.py").hosts] == ["h1", "h2"]
    assert parsed("--host", "h1,h2", "--nproc_per_node", "1", "t.py").master_addr == "h1"
    assert parsed("--host", "h1,h2", "--nproc_per_node", "1", "--extra_launch_args", "master_addr=h9", "t.py").master_addr == "h9"


def test_module_takes_options_on_both_sides_of_its_name():
    job = parsed("-m", "pkg.train", "--nproc_per_node", "2", "--lr", "1", "--host", "x")
    assert (job.program, job.module, job.nproc, job.args) == ("pkg.train", True, "2", ("--lr", "1", "--host", "x"))
    assert parsed("--nproc_per_node", "2", "-m", "pkg.train", "--", "--host", "x").args == ("--host", "x")
    assert parsed("--nproc_per_node", "2", "-m", "pkg.train", "words").args == ("words",)


def test_slots_of_the_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=2 # here\n\n127.0.0.1 slots=1\n")
    job = parsed("--hostfile", str(path), "t.py")
    assert [job.options(rank)["nproc_per_node"] for rank in range(2)] == ["2", "1"]
    assert job.options(1)["node_rank"] == "1"


# ---------------------------------------------------------------- what it does


def test_two_processes_get_the_arguments_and_the_environment_exactly(work):
    (work[0] / "note.py").write_text(NOTE)
    words = ["two words", "quote'd", "$HOME", "a;b", "", "*", "--", "--host", "line\nbreak", "é"]
    out, err, code = finish(
        start(
            work,
            "--nproc_per_node",
            "2",
            "--master_port",
            "0",
            "note.py",
            *words,
            GLOO_SOCKET_IFNAME="lo",
            NCCL_DEBUG="WARN",
        )
    )
    assert code == 0, err
    assert "localhost: success" in out
    notes = notes_of(work)
    assert [note["RANK"] for note in notes] == ["0", "1"] == [note["LOCAL_RANK"] for note in notes]
    assert all(note["argv"] == words and note["WORLD_SIZE"] == "2" and note["MASTER_ADDR"] == "127.0.0.1" for note in notes)
    assert all((note["GLOO_SOCKET_IFNAME"], note["NCCL_DEBUG"]) == ("lo", "WARN") for note in notes)


def test_a_failing_process_shows_its_error_and_fails_the_job(work):
    (work[0] / "fail.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('rank one is unhappy')\n")
    out, err, code = finish(start(work, "--nproc_per_node", "2", "--master_port", "0", "fail.py"))
    assert code == 1
    assert "ValueError: rank one is unhappy" in err
    assert "localhost: failure (exit code 1)" in out


SLEEPER = textwrap.dedent(
    """
    import os, sys, time
    open(os.path.join(os.environ["COLOSSALAI_TEST_NOTES"], str(os.getpid())), "w").close()
    time.sleep(300)
    """
)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at /proc")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_a_signal_stops_every_process(work, signum):
    (work[0] / "sleep.py").write_text(SLEEPER)
    process = start(work, "--nproc_per_node", "2", "--master_port", "0", "sleep.py")
    deadline = time.monotonic() + 150
    while len(pids := os.listdir(work[0] / "notes")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2, finish(process)
    process.send_signal(signum)
    out, err, code = finish(process, 60)
    assert code == 128 + signum, err
    assert [pid for pid in pids if alive(pid)] == []


TRAIN = textwrap.dedent(
    """
    import datetime, json, os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(12, 7), torch.randn(12, 5)
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    for _ in range(3):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(ddp(x[mine]), y[mine]).backward()
        sgd.step()
    with open(os.path.join(os.environ["COLOSSALAI_TEST_NOTES"], "rank" + os.environ["RANK"]), "w") as file:
        json.dump({
            "world": dist.get_world_size(), "local": os.environ["LOCAL_RANK"], "node": os.environ["GROUP_RANK"],
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"), "loss": torch.nn.functional.mse_loss(model(x), y).item(),
        }, file)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch 2.13: a gloo thread that still drops a tensor while Python shuts down aborts the process
    """
)


def reference_loss():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(12, 7), torch.randn(12, 5)
    for _ in range(3):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        sgd.step()
    return torch.nn.functional.mse_loss(model(x), y).item()


def check_four_ranks(work):
    notes = notes_of(work)
    assert [(note["world"], note["node"], note["local"]) for note in notes] == [(4, n, r) for n in "01" for r in "01"]
    assert all(note["gloo"] == "lo" for note in notes)
    assert all(note["loss"] == pytest.approx(reference_loss(), rel=1e-5) for note in notes)


def test_c10_two_agents_on_this_machine_train_together(work):
    (work[0] / "train.py").write_text(TRAIN)
    out, err, code = finish(
        start(
            work,
            "--host",
            "localhost,127.0.0.1",
            "--nproc_per_node",
            "2",
            "--master_port",
            "0",
            "train.py",
            GLOO_SOCKET_IFNAME="lo",
        )
    )
    assert code == 0, err
    assert "localhost: success" in out and "127.0.0.1: success" in out
    check_four_ranks(work)


FAKE_SSH = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open(os.environ["COLOSSALAI_TEST_SSH"] + words[-2], "w") as file:
    json.dump(words, file)
env = {{"PATH": "/usr/bin:/bin"}}  # what a login there might have
sys.exit(subprocess.run(words[-1], shell=True, env=env, cwd="/").returncode)
"""


@pytest.mark.skipif(os.name != "posix", reason="runs a POSIX shell")
def test_c10_two_remote_hosts_over_ssh(work):
    """Both hosts are reached through ssh, here a program of that name that runs the command with a bare environment."""
    folder, env = work
    (folder / "train.py").write_text(TRAIN)
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(FAKE_SSH.format(python=sys.executable))
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (folder / "hosts").write_text("# two machines\n198.51.100.1 slots=2\n198.51.100.2 slots=2\n")
    port = str(free_port())
    argv = [
        "--hostfile",
        "hosts",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        port,
        "--ssh-port",
        "2222",
        "train.py",
    ]
    more = {
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": f"{ssh.parent}{os.pathsep}{env['PATH']}",
        "COLOSSALAI_TEST_SSH": str(folder / "ssh-"),
    }
    out, err, code = finish(start(work, *argv, SECRET="s", **more))
    assert code == 0, err
    assert "198.51.100.1: success" in out and "198.51.100.2: success" in out
    check_four_ranks(work)
    calls = [json.loads((folder / f"ssh-198.51.100.{host}").read_text()) for host in (1, 2)]
    assert all(call[call.index("-p") + 1] == "2222" and "SECRET" not in call[-1] for call in calls)


def test_c10_hosts_that_do_not_meet_are_told_so_within_a_minute(work):
    """Each of two machines starts its own agent, one with a wrong port."""
    (work[0] / "train.py").write_text(TRAIN)
    started = time.monotonic()
    agents = [
        start(
            work, "--nproc_per_node", "2", "--rdzv_timeout", "8", "--master_port", str(free_port()),
            "--extra_launch_args", f"nnodes=2,node_rank={rank}", "train.py",
        )
        for rank in range(2)
    ]  # fmt: skip
    for agent in agents:
        out, err, code = finish(agent, 100)
        assert code == 1
        last = err.strip().splitlines()[-1]
        assert re.match(r"Error: the 2 hosts did not meet at 127\.0\.0\.1:\d+ within 8 s", last), err
        assert "--master_port" in last and "--rdzv_timeout" in last
    assert time.monotonic() - started < 60
