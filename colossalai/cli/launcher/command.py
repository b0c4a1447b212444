"""The commands of a job, as argument lists: one agent of ``torch.distributed.run`` a host, over ssh to a remote one."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colossalai.utils.errors import ConfigError

from .hosts import LOOPBACK, Host

# What a remote process needs to find the same programs and the same network. Anything else stays here: a whole
# environment carries secrets, and settings that are right for this machine only.
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "UCX_", "TRITON_", "COLOSSALAI_")
FORWARDED_NAMES = frozenset(
    "PATH LD_LIBRARY_PATH PYTHONPATH PYTHONUNBUFFERED PYTHONHASHSEED VIRTUAL_ENV CONDA_PREFIX TOKENIZERS_PARALLELISM "
    "HF_HOME HF_HUB_OFFLINE TRANSFORMERS_OFFLINE".split()
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Job:
    """What one ``colossalai run`` starts: the same program on every host.

    Attributes:
        hosts: in rank order.
        program: script path, or module name if ``module``.
        args: the program's own arguments, passed on exactly.
        nproc: processes a host as torch's launcher takes it (a number, or "gpu", "cpu", "auto"); None takes each host's
            slots.
        rdzv_timeout: seconds the hosts may take to meet.
        extra: further options of torch's launcher, which win over those made here; None as value for a bare flag.
        forward: names of variables to forward to remote hosts besides the usual ones.
    """

    hosts: tuple[Host, ...]
    program: str
    args: tuple[str, ...] = ()
    module: bool = False
    nproc: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    rdzv_timeout: int = 45
    extra: Mapping[str, str | None] = field(default_factory=dict)
    ssh_port: int | None = None
    forward: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigError("a job needs at least one host")
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"--master_port {self.master_port}: a port is between 1 and 65535")
        if self.rdzv_timeout < 1:
            raise ConfigError(f"--rdzv_timeout {self.rdzv_timeout}: at least 1 second is needed")
        bad = [name for name in self.forward if not _VARIABLE.fullmatch(name)]
        if bad:
            raise ConfigError(f"--forward_env {','.join(bad)}: not the name of an environment variable")
        for host in self.hosts:
            self.nproc_of(host)

    def nproc_of(self, host: Host) -> str:
        """Processes on ``host``. ConfigError if neither --nproc_per_node nor its slots say, or if they contradict."""
        if self.nproc is None:
            if host.slots is None:
                raise ConfigError(
                    f"--nproc_per_node is missing: how many processes shall run on {host.name}? "
                    "Give a number (usually one per GPU), or slots=N for every host in the hostfile"
                )
            return str(host.slots)
        if self.nproc.isdigit():
            if int(self.nproc) < 1:
                raise ConfigError(f"--nproc_per_node {self.nproc}: must be at least 1")
            if host.slots is not None and int(self.nproc) > host.slots:
                raise ConfigError(
                    f"--nproc_per_node {self.nproc} is more than the slots={host.slots} of {host.name} in the "
                    "hostfile; lower it, or leave it out to use each host's slots"
                )
        elif self.nproc not in ("gpu", "cpu", "auto"):
            raise ConfigError(f"--nproc_per_node {self.nproc}: must be a number, or gpu, cpu or auto")
        return self.nproc

    def options(self, node_rank: int) -> dict[str, str | None]:
        """Options of torch's launcher for the host of this rank; those of ``extra`` win."""
        made: dict[str, str | None] = {
            "nproc_per_node": self.nproc_of(self.hosts[node_rank]),
            "nnodes": str(len(self.hosts)),
            "node_rank": str(node_rank),
            "master_addr": self.master_addr,
            "master_port": str(self.master_port),
            # "timeout" bounds the static rendezvous, "join_timeout" that of c10d, which --standalone chooses.
            "rdzv_conf": f"timeout={self.rdzv_timeout},join_timeout={self.rdzv_timeout}",
        }
        return made | dict(self.extra)

    @property
    def nnodes(self) -> str:
        """Hosts of the whole job: more than ``hosts`` if each machine starts its own agent (nnodes in ``extra``)."""
        return self.options(0)["nnodes"] or "1"

    @property
    def endpoint(self) -> tuple[str, int | None]:
        """Address and port where the hosts meet (None where torch chooses the port)."""
        options = self.options(0)
        if "standalone" in options or options.get("rdzv_endpoint"):
            return options.get("rdzv_endpoint") or "localhost", None
        port = options["master_port"] or ""
        return options["master_addr"] or "", int(port) if port.isdigit() else None


def parse_extra(text: str | None) -> dict[str, str | None]:
    """``a=1,b`` -> ``{"a": "1", "b": None}``, dashes in names read as underscores. ConfigError otherwise."""
    extra: dict[str, str | None] = {}
    for piece in (text or "").split(","):
        name, equals, value = piece.strip().partition("=")
        name = name.removeprefix("--")
        if not piece.strip():
            continue
        if not _FLAG.fullmatch(name):
            raise ConfigError(f"--extra_launch_args: {piece!r} is not an option; write name=value,name=value or a bare flag")
        extra[name.replace("-", "_")] = value if equals else None
    return extra


def agent_command(job: Job, node_rank: int, python: str | None = None) -> list[str]:
    """The argument list that runs the job's part of one host; it goes to the system as it is, through no shell."""
    options = [f"--{name}" if value is None else f"--{name}={value}" for name, value in job.options(node_rank).items()]
    module = ["-m"] if job.module else []
    return [python or sys.executable, "-m", "torch.distributed.run", *options, *module, job.program, *job.args]


def forwarded(env: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables of ``env`` a remote host is given: network, threads, devices, search paths, and ``more``."""
    return {
        name: value
        for name, value in sorted(env.items())
        if _VARIABLE.fullmatch(name)  # a shell function that bash exported is none
        and (name in more or name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES))
    }


def remote_command(job: Job, node_rank: int, env: Mapping[str, str] | None = None, cwd: str | None = None) -> list[str]:
    """The ssh command that runs one host's agent in the same folder, with the forwarded variables.

    ssh hands the remote shell one line, so every word of it is quoted. The agent is stopped when its ssh connection
    ends, however it ends: a small watcher reads the connection's input, which closes with it.
    """
    variables = forwarded(os.environ if env is None else env, job.forward)
    agent = ["env", *(f"{name}={value}" for name, value in variables.items()), *agent_command(job, node_rank)]
    script = (
        f"cd {shlex.quote(cwd or os.getcwd())} || exit 1; exec 3<&0; {shlex.join(agent)} </dev/null 3<&- & agent=$!; "
        "{ cat <&3 >/dev/null; kill -TERM $agent; sleep 40; kill -KILL $agent; } >/dev/null 2>&1 & watcher=$!; "
        "exec 3<&-; wait $agent; code=$?; kill $watcher 2>/dev/null; exit $code"
    )
    port = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
    # BatchMode: a password prompt would wait for ever. ServerAlive: notice a dead host within two minutes.
    options = ["BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=30", "ServerAliveCountMax=4"]
    named = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *port, *named, job.hosts[node_rank].name, f"sh -c {shlex.quote(script)}"]


def resolve_auto(nproc: str, hosts: Sequence[Host], device_count: int) -> tuple[str, dict[str, str]]:
    """What ``--nproc_per_node auto`` means on this machine, and variables to set for it.

    One process per accelerator; without any, two (one on a single core) that share the cores between them: more
    processes on a CPU only add communication. Remote hosts are not asked, so there "auto" is refused.
    """
    if nproc != "auto":
        return nproc, {}
    if not all(host.local for host in hosts):
        raise ConfigError("--nproc_per_node auto counts the devices of this machine; for remote hosts give a number, or gpu")
    if device_count:
        return str(device_count), {}
    cores = os.cpu_count() or 1
    procs = min(cores, 2)
    return str(procs), {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // procs))}


def choose_master(master_addr: str | None, hosts: Sequence[Host]) -> str:
    """Where the hosts meet: as given, else this machine for a local job, else the first host.

    Raises:
        ConfigError: the first host is called by a loopback name, which means another machine on each of the others.
    """
    if master_addr is not None:
        return master_addr
    if all(host.local for host in hosts):
        return "127.0.0.1"
    first = hosts[0].name.rpartition("@")[2]
    if first in LOOPBACK:
        raise ConfigError(
            f"the first host is called {first}, which the other hosts cannot reach; name it by an address they can, "
            "or give --master_addr"
        )
    return first


def check_port(address: str, port: int) -> None:
    """ConfigError if ``port`` of this machine is taken: torch's launcher says so only in a long traceback."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # a port in TIME_WAIT is free for torch's store, which sets the same option
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--master_port {port} of this machine cannot be used ({error.strerror}); another job may hold it: "
                "give another number, or 0 to take a free one"
            ) from error


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
