"""Starting: every process joins the others, takes its device and seeds its generators."""

import atexit
import gc
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .accelerator import get_accelerator
from .cluster.backend import resolve_backend
from .cluster.local_rank import remember_local_rank
from .cluster.rendezvous import await_listener, gather_at
from .logging import get_dist_logger
from .utils import set_seed
from .utils.errors import ConfigError
from .utils.limits import ENV_TIMEOUT, group_timeout, rendezvous_timeout
from .utils.pending import pending_names
from .utils.slurm import slurm_hosts, slurm_port

__all__ = ["launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

__getattr__ = pending_names(__name__)


@dataclass(frozen=True)
class Start:
    """Who this process is and where it meets the others. ``host=None`` is a world of one that needs no network."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str | None
    port: int | None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size={self.world_size}: there is at least one process")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} must be from 0 to world_size - 1 = {self.world_size - 1}")
        if self.local_rank is not None and self.local_rank < 0:
            raise ConfigError(f"local_rank={self.local_rank} must be 0 or more, or None for rank % devices of this machine")
        if self.host is None and self.world_size > 1:
            raise ConfigError(f"host=None with world_size={self.world_size}: name the machine of rank 0")
        if self.host is not None and (self.port is None or not 0 < self.port < 65536):
            raise ConfigError(f"port={self.port}: give the free TCP port of rank 0's machine, 1 to 65535")


def launch(
    rank: int,
    world_size: int,
    host: str | None,
    port: int | None,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Join ``world_size`` processes that meet at ``host:port``, take a device and seed all generators alike.

    Args:
        rank: the number of this process, 0 to ``world_size - 1``.
        host: the machine of rank 0; an IPv6 address is fine. None for a world of one, which then needs no network.
        port: a free TCP port there.
        backend: ``"nccl"`` means the accelerator's own backend: NCCL (with gloo for host memory) on CUDA, gloo on a
            CPU. Any other is used as given.
        local_rank: which device of this machine to take; None means ``rank`` modulo their number.
        seed: for Python, numpy and torch, the same on every rank.
        verbose: say on rank 0 how many have met.

    Calling it again with the same rank and world size only seeds again, and warns if the backend is another. Raises
    ConfigError for arguments that cannot be, or that differ from the world this process is in, and RuntimeError if the
    others do not come within 50 seconds (``COLOSSALAI_TIMEOUT`` sets another limit, for this wait and for every
    collective).
    """
    start = Start(int(rank), int(world_size), local_rank, host, None if port is None else int(port))
    chosen = resolve_backend(backend)
    limit = group_timeout()
    _take_device(start, chosen)
    if not _already_in(start, chosen):
        store = dist.HashStore() if start.host is None else _meet(start, rendezvous_timeout())
        dist.init_process_group(
            chosen,
            rank=start.rank,
            world_size=start.world_size,
            store=dist.PrefixStore("colossalai", store),
            timeout=limit,
        )
        _leave_at_exit()
    remember_local_rank(start.local_rank)
    set_seed(seed)
    _optimize_ddp(start.world_size)
    if verbose:
        get_dist_logger().info(
            f"Distributed environment is initialized, world size: {start.world_size}, backend: {chosen}", ranks=[0]
        )


def launch_from_torch(backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    """``launch`` with what torchrun and ``colossalai run`` put into the environment.

    Without any of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT it starts a world of one, so that the same
    script runs under plain ``python``. With some of them, a missing or unreadable one raises RuntimeError by name.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not any(name in os.environ for name in names):
        launch(0, 1, None, None, backend, local_rank=0, seed=seed, verbose=verbose)
        return
    env = _Environment("launch_from_torch", "start the script with `torchrun` or `colossalai run`, or set none of "
                       f"{', '.join(names)} to run one process")  # fmt: skip
    rank, local_rank, world_size = env.number("RANK"), env.number("LOCAL_RANK"), env.number("WORLD_SIZE")
    launch(rank, world_size, env.text("MASTER_ADDR"), env.number("MASTER_PORT"), backend, local_rank, seed, verbose)


def launch_from_slurm(
    host: str | None = None, port: int | None = None, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """``launch`` with what Slurm tells each task of ``srun``.

    Args:
        host: the machine of rank 0; None takes MASTER_ADDR, else the first of the job's node list.
        port: None takes MASTER_PORT, else one derived from the numbers of the job and its step.
    """
    start = _slurm_start(host, port, os.environ)
    launch(start.rank, start.world_size, start.host, start.port, backend, start.local_rank, seed, verbose)


def launch_from_openmpi(
    host: str | None = None, port: int | None = None, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """``launch`` with what OpenMPI tells each process of ``mpirun``.

    Args:
        host: the machine of rank 0; None takes MASTER_ADDR.
        port: a free TCP port there; None takes MASTER_PORT.
    """
    env = _Environment("launch_from_openmpi", "start the script with `mpirun`")
    rank, world_size = env.number("OMPI_COMM_WORLD_RANK"), env.number("OMPI_COMM_WORLD_SIZE")
    local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK")
    env = _Environment("launch_from_openmpi", "give it, or the argument host or port, as mpirun does not")
    host = env.text("MASTER_ADDR") if host is None else host
    port = env.number("MASTER_PORT") if port is None else port
    launch(rank, world_size, host, port, backend, local_rank, seed, verbose)


_leaves_at_exit = False


def _leave_at_exit() -> None:
    global _leaves_at_exit
    if not _leaves_at_exit:
        _leaves_at_exit = True
        atexit.register(_leave)


def _leave() -> None:
    """Before the interpreter goes: let the threads of gloo drop the tensors they still hold.

    A thread that gives back the last reference to a tensor needs the interpreter; meeting one that is shutting down, it aborts the
    process (exit code -6) although all work is done. Destroying the groups joins those threads, unless something still refers to
    a group: then they are given a moment. After an uncaught exception (which leaves ``sys.last_value``) nothing is destroyed: others
    may still wait in a collective, and so would this.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
    gc.collect()
    time.sleep(0.2)


class _Environment:
    """Reads variables and says, if one is missing or wrong, who wanted it and what to do."""

    def __init__(self, who: str, advice: str, environ: Mapping[str, str] | None = None) -> None:
        self._who, self._advice = who, advice
        self._environ = os.environ if environ is None else environ

    def text(self, *names: str) -> str:
        """The first of these variables that is set."""
        for name in names:
            if self._environ.get(name, "").strip():
                return self._environ[name].strip()
        raise RuntimeError(f"{self._who}: the environment variable {' or '.join(names)} is missing; {self._advice}")

    def number(self, *names: str) -> int:
        """The first of these variables that is set, as an integer."""
        text = self.text(*names)
        try:
            return int(text)
        except ValueError:
            raise RuntimeError(
                f"{self._who}: the environment variable {' or '.join(names)} is {text!r}, not an integer; {self._advice}"
            ) from None


def _slurm_start(host: str | None, port: int | None, environ: Mapping[str, str]) -> Start:
    env = _Environment("launch_from_slurm", "start the script with `srun`", environ)
    rank, world_size = env.number("SLURM_PROCID"), env.number("SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = env.number("SLURM_LOCALID") if environ.get("SLURM_LOCALID", "").strip() else None
    if host is None:
        host = environ.get("MASTER_ADDR", "").strip() or slurm_hosts(
            env.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        )[0]  # fmt: skip
    if port is None:
        port = env.number("MASTER_PORT") if environ.get("MASTER_PORT", "").strip() else slurm_port(environ)
    return Start(rank, world_size, local_rank, host, port)


def _already_in(start: Start, backend: str) -> bool:
    """Whether this process has joined this very world; another one is an error."""
    if not dist.is_initialized():
        return False
    if (dist.get_rank(), dist.get_world_size()) != (start.rank, start.world_size):
        raise ConfigError(
            f"launch(rank={start.rank}, world_size={start.world_size}): this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()} already; call torch.distributed.destroy_process_group() before joining another"
        )
    if dist.get_backend() != backend:
        get_dist_logger().warning(
            f"launch: this process has joined its world already, over {dist.get_backend()}; {backend} is not used",
            ranks=[0],
        )
    return True


def _take_device(start: Start, backend: str) -> None:
    accelerator = get_accelerator()
    if not accelerator.support_set_device:
        return
    devices = accelerator.device_count()
    device = start.rank % devices if start.local_rank is None else start.local_rank
    if device >= devices:
        if accelerator.communication_backend in backend:
            raise ConfigError(
                f"local_rank={device}: this machine shows {devices} {accelerator.name} device(s); start no more "
                "processes than that on it (see CUDA_VISIBLE_DEVICES), or let them share with backend='gloo'"
            )
        device %= devices
    accelerator.set_device(device)


_rounds_of_agent = 0


def _meet(start: Start, limit: timedelta) -> dist.Store:
    """Open the store of rank 0 and wait until every rank has come to it; raise, by rank, if one does not."""
    global _rounds_of_agent
    # torch's elastic agent keeps a store of its own at this address; then nobody else opens one.
    from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    host = start.host.strip("[]")  # an IPv6 address may come in brackets
    where = f"[{host}]:{start.port}" if ":" in host else f"{host}:{start.port}"
    within = f"within {limit.total_seconds():g} s (set {ENV_TIMEOUT} to wait longer)"
    opens = start.rank == 0 and not from_agent
    deadline = time.monotonic() + limit.total_seconds()
    try:
        if not opens:
            # torch's client doubles the time it is given when nobody answers; so it is started when somebody does.
            await_listener(host, start.port, deadline)
        store: dist.Store = dist.TCPStore(
            host, start.port, start.world_size, is_master=opens, timeout=limit, wait_for_workers=False
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = (
            f"rank 0 cannot open {where}: choose a free port of this machine"
            if opens
            else f"rank {start.rank} of {start.world_size} found nobody at {where} {within}: host and port must be "
            "those of rank 0, which must have been started and be reachable from here"
        )
        raise RuntimeError(f"launch: {reason} [{_first_line(error)}]") from error
    if from_agent:
        # This store outlives a restart, and a second launch after the first world was left.
        store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_rounds_of_agent}", store)
        _rounds_of_agent += 1
    gather_at(store, start.rank, start.world_size, limit, f"at {where} {within}")
    return store


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _optimize_ddp(world_size: int) -> None:
    """Let torch.compile split graphs at DDP's buckets where there are several ranks, and nowhere else."""
    config = sys.modules.get("torch._dynamo.config")
    if config is None:
        if world_size > 1:
            return  # torch's own default, and importing dynamo for it would take a second
        try:
            import torch._dynamo.config as config
        except ImportError:
            return
    config.optimize_ddp = world_size > 1
