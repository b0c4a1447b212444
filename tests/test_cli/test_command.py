"""The commands a job is made of: exact arguments, quoting over ssh, forwarded variables."""

import os
import subprocess
import sys

import pytest

from colossalai.cli.launcher.command import (
    Job,
    agent_command,
    check_port,
    choose_master,
    forwarded,
    free_port,
    parse_extra,
    remote_command,
    resolve_auto,
)
from colossalai.cli.launcher.hosts import Host
from colossalai.utils.errors import ConfigError

NASTY = ("--name", "two words", "quote'd", '"double"', "$HOME", "a;b", "", "*", "back\\slash", "line\nbreak", "--", "é")


def make(*hosts, **changes):
    job = dict(hosts=hosts or (Host("localhost"),), program="train.py", args=NASTY, nproc="2", master_addr="10.0.0.1")
    return Job(**{**job, **changes})


def test_agent_command_is_a_list_with_the_arguments_unchanged():
    argv = agent_command(make(Host("a"), Host("b"), master_port=1234, rdzv_timeout=7), 1, python="py")
    assert argv[:3] == ["py", "-m", "torch.distributed.run"]
    assert argv[3:9] == [
        "--nproc_per_node=2",
        "--nnodes=2",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=1234",
        "--rdzv_conf=timeout=7,join_timeout=7",
    ]
    assert argv[9:] == ["train.py", *NASTY]


def test_agent_command_for_a_module():
    argv = agent_command(make(program="pkg.train", module=True, args=("--lr", "1")), 0)
    assert argv[-4:] == ["-m", "pkg.train", "--lr", "1"]


def test_extra_arguments_win_and_bare_flags_stay_bare():
    extra = parse_extra("master-port=99, standalone,--max_restarts=2,nnodes=3,rdzv_conf=timeout=5")
    assert extra == {
        "master_port": "99",
        "standalone": None,
        "max_restarts": "2",
        "nnodes": "3",
        "rdzv_conf": "timeout=5",
    }
    argv = agent_command(make(extra=extra), 0)
    assert [a for a in argv if a.startswith("--master_port")] == ["--master_port=99"]
    assert [a for a in argv if a.startswith("--nnodes")] == ["--nnodes=3"]
    assert [a for a in argv if a.startswith("--rdzv_conf")] == ["--rdzv_conf=timeout=5"]
    assert "--standalone" in argv and "--max_restarts=2" in argv
    assert argv.index("--max_restarts=2") < argv.index("train.py")
    assert parse_extra(None) == parse_extra("") == {}
    with pytest.raises(ConfigError, match="--extra_launch_args: '1' is not an option"):
        parse_extra("local_ranks_filter=0,1")


def test_options_are_those_torch_understands():
    from torch.distributed.run import parse_args

    args = parse_args(agent_command(make(Host("a"), Host("b", slots=5), nproc=None, hosts=(Host("b", slots=5),)), 0)[3:])
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("5", "1", 0)
    assert (args.master_addr, args.master_port, args.rdzv_conf) == ("10.0.0.1", 29500, "timeout=45,join_timeout=45")
    assert args.training_script == "train.py" and tuple(args.training_script_args) == NASTY


def test_slots_stand_in_for_nproc_and_must_not_be_exceeded():
    job = make(Host("a", slots=1), Host("b", slots=4), nproc=None)
    assert [job.nproc_of(host) for host in job.hosts] == ["1", "4"]
    with pytest.raises(ConfigError, match="--nproc_per_node is missing.* on c"):
        make(Host("b", slots=4), Host("c"), nproc=None)
    with pytest.raises(ConfigError, match="--nproc_per_node 5 is more than the slots=4 of b"):
        make(Host("b", slots=4), nproc="5")
    for wrong in ("0", "two", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--nproc_per_node"):
            make(nproc=wrong)


def test_auto_means_one_a_device_or_two_sharing_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    here = [Host("localhost")]
    assert resolve_auto("auto", here, 8) == ("8", {})
    assert resolve_auto("auto", here, 0) == ("2", {"OMP_NUM_THREADS": "6"})
    assert resolve_auto("3", here, 8) == ("3", {})
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert resolve_auto("auto", here, 0) == ("1", {"OMP_NUM_THREADS": "1"})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert resolve_auto("auto", here, 0) == ("1", {})
    with pytest.raises(ConfigError, match="auto"):
        resolve_auto("auto", [Host("198.51.100.1")], 8)


def test_only_what_a_remote_host_needs_is_forwarded():
    env = {
        "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "TORCH_LOGS": "x", "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": "/a b", "COLOSSALAI_X": "1", "PATH": "/bin", "LD_LIBRARY_PATH": "/lib",
        "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "s", "WANDB_API_KEY": "s",
        "TORCHELASTIC_RUN_ID": "none", "BASH_FUNC_x%%": "() { :; }", "MY_FLAG": "1", "RANK": "0", "MASTER_ADDR": "x",
    }  # fmt: skip
    given = forwarded(env, more=("MY_FLAG",))
    assert set(env) - set(given) == {
        "HOME", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "TORCHELASTIC_RUN_ID", "BASH_FUNC_x%%",
        "RANK", "MASTER_ADDR",
    }  # fmt: skip
    assert all(given[name] == env[name] for name in given)


PRINTER = """
import json, os, sys
gloo, secret = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("SECRET")
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "gloo": gloo, "secret": secret}))
sys.exit(3)
"""


@pytest.mark.skipif(os.name != "posix", reason="runs a POSIX shell")
def test_remote_command_survives_two_shells_exactly(tmp_path, monkeypatch):
    """What ssh would hand to the remote shell, handed to a local one."""
    import json

    folder = tmp_path / "it's a folder"
    folder.mkdir()
    printer = tmp_path / "agent.py"
    printer.write_text(PRINTER)
    job = make(Host("198.51.100.1"), ssh_port=2222)
    monkeypatch.setattr("colossalai.cli.launcher.command.agent_command", lambda job, rank: [sys.executable, str(printer), *NASTY])
    argv = remote_command(job, 0, env={"GLOO_SOCKET_IFNAME": "l o'", "SECRET": "s"}, cwd=str(folder))
    assert argv[0] == "ssh" and argv[argv.index("-p") + 1] == "2222" and "BatchMode=yes" in argv
    assert argv[-2] == "198.51.100.1"
    pipe = subprocess.PIPE
    with subprocess.Popen(argv[-1], shell=True, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as shell:
        said = json.loads(shell.stdout.readline())
        assert shell.wait(timeout=60) == 3, shell.stderr.read()
    assert said == {"argv": list(NASTY), "cwd": str(folder), "gloo": "l o'", "secret": None}


@pytest.mark.skipif(os.name != "posix", reason="runs a POSIX shell")
def test_remote_agent_ends_when_its_connection_does(tmp_path, monkeypatch):
    agent = tmp_path / "agent.py"
    agent.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr("colossalai.cli.launcher.command.agent_command", lambda job, rank: [sys.executable, str(agent)])
    command = remote_command(make(Host("198.51.100.1")), 0, env={"PATH": os.environ["PATH"]})[-1]
    shell = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shell.stdout.readline() == b"up\n"
    shell.stdin.close()
    assert shell.wait(timeout=20) == 128 + 15
    shell.stdout.close()
    shell.stderr.close()


def test_c6_no_shell_export_under_windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    job = make(Host("localhost"), Host("198.51.100.1"))
    commands = [agent_command(job, 0), remote_command(job, 1, env={"NCCL_DEBUG": "INFO", "PATH": "/bin"})]
    assert all(isinstance(command, list) and all(isinstance(word, str) for word in command) for command in commands)
    assert not any("export" in word for command in commands for word in command)


def test_where_the_hosts_meet():
    remote = Host("198.51.100.1")
    assert choose_master(None, [Host("localhost")]) == "127.0.0.1"
    assert choose_master(None, [Host("localhost"), Host("127.0.0.1")]) == "127.0.0.1"
    assert choose_master(None, [remote, Host("198.51.100.2")]) == "198.51.100.1"
    assert choose_master(None, [Host("me@198.51.100.1"), remote]) == "198.51.100.1"
    assert choose_master("10.1.1.1", [remote]) == "10.1.1.1"
    with pytest.raises(ConfigError, match="localhost, which the other hosts cannot reach"):
        choose_master(None, [Host("localhost"), remote])


def test_a_taken_port_is_named():
    import socket

    check_port("127.0.0.1", free_port())
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        with pytest.raises(ConfigError, match=f"--master_port {holder.getsockname()[1]}"):
            check_port("127.0.0.1", holder.getsockname()[1])


@pytest.mark.parametrize(
    "changes, message",
    [({"master_port": 0}, "--master_port 0"), ({"rdzv_timeout": 0}, "--rdzv_timeout"), ({"forward": ("A B",)}, "A B")],
)
def test_job_checks_itself(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)
