"""Persistent worker processes for multi-process tests.

Starting a process and importing torch costs seconds, a parity case milliseconds. A pool therefore keeps the ranks of
one world size alive over many tests: forked from a server that has everything imported, joined once in a gloo group.
After a case that raised, died or ran out of time the pool's processes are killed and new ones started for the next
case, since a group whose ranks left a collective at different places is no longer usable.
"""

import atexit
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
START_SECONDS = 180.0
GRACE_SECONDS = 2.0
MAX_ALIVE = 2
LOG_TAIL = 4000


@dataclass
class CaseFailure:
    """How a case ended that gave no result."""

    case: str
    kind: str
    """``raised``, ``died`` or ``timeout``."""
    rank: int | None
    error: str = ""
    """Type of the exception, of the rank that raised first."""
    message: str = ""
    report: str = ""
    """For a human: tracebacks, exit codes, tail of the ranks' output."""
    exitcodes: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.report


class WorkerFailure(Exception):
    """A case raised in a worker, killed it, or ran out of time; ``failure`` has the details."""

    def __init__(self, failure: CaseFailure) -> None:
        super().__init__(failure.report)
        self.failure = failure


class WorkerPool:
    """The ranks of one world size, alive from case to case."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.starts = 0
        self._ranks: list[multiprocessing.Process] = []
        self._conns: list = []
        self._logs: list[Path] = []
        self._folder: str | None = None
        self._store = None

    def run(self, fn: Callable, timeout: float = 60, **kwargs: Any) -> list:
        """``fn(rank, world_size, **kwargs)`` on every rank: the results by rank, or :class:`WorkerFailure`.

        ``fn`` is a module-level function; arguments and results are pickled. ``timeout`` is in seconds.
        """
        name = getattr(fn, "__qualname__", str(fn))
        result = self.run_cases(fn, {name: kwargs}, timeout)[name]
        if isinstance(result, CaseFailure):
            raise WorkerFailure(result)
        return result

    def run_cases(self, fn: Callable, cases: dict[str, dict], timeout: float = 60) -> dict[str, list | CaseFailure]:
        """``fn`` once for each case's keyword arguments, without waiting in between.

        Returns by case name the list of results by rank, or a :class:`CaseFailure`; the other cases run all the same.
        ``timeout`` is for one case.
        """
        where = (fn.__module__, inspect.getfile(fn), fn.__qualname__)
        names, results = list(cases), {}
        while len(results) < len(names):
            first = len(results)
            self._ensure_started()
            rest = [cases[name] for name in names[first:]]
            message = pickle.dumps((where, first, rest, sys.path))
            for conn in self._conns:
                conn.send_bytes(message)
            done, failure = self._collect(names, first, timeout)
            results |= done
            if failure is not None:
                results[failure.case] = failure
                self.close()
        return results

    def _collect(self, names: list[str], first: int, timeout: float) -> tuple[dict[str, list], CaseFailure | None]:
        """Results of the cases from number ``first`` on, up to the first one that failed."""
        got: list[list] = [[] for _ in range(self.world_size)]
        done: dict[str, list] = {}
        errors: dict[int, tuple] = {}
        dead: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        while len(done) < len(names) - first:
            ready = self._wait(errors, dead, deadline)
            if not ready:
                break
            for rank in ready:
                self._receive(rank, got, errors, dead)
            while len(done) < min(map(len, got)):
                done[names[first + len(done)]] = [mine[len(done)] for mine in got]
                deadline = time.monotonic() + timeout
            if errors or dead:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        else:
            return done, None
        return done, self._failure(names[first + len(done)], errors, dead, timeout)

    def _wait(self, errors: dict, dead: dict, deadline: float) -> list[int]:
        """Ranks that have something to read or have ended; none once nothing more can come in time."""
        open_ranks = [rank for rank in range(self.world_size) if rank not in errors and rank not in dead]
        left = deadline - time.monotonic()
        if not open_ranks or left <= 0:
            return []
        things = {thing: rank for rank in open_ranks for thing in (self._conns[rank], self._ranks[rank].sentinel)}
        return sorted({things[thing] for thing in wait(list(things), timeout=left)})

    def _receive(self, rank: int, got: list[list], errors: dict, dead: dict) -> None:
        try:
            while self._conns[rank].poll():
                _, status, value = pickle.loads(self._conns[rank].recv_bytes())
                if status == "error":
                    errors[rank] = value
                elif status == "ok":
                    got[rank].append(value)
        except (EOFError, OSError):
            self._ranks[rank].join(GRACE_SECONDS)
            dead[rank] = self._ranks[rank].exitcode

    def _failure(self, case: str, errors: dict, dead: dict, timeout: float) -> CaseFailure:
        waiting = [rank for rank in range(self.world_size) if rank not in errors and rank not in dead]
        if waiting:
            self._dump_stacks(waiting)
        lines = [f"case {case!r} on {self.world_size} processes:"]
        for rank, (_, _, text) in errors.items():
            lines.append(f"--- rank {rank} raised\n{text.rstrip()}")
        for rank, code in dead.items():
            name = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
            lines.append(f"--- rank {rank} died with exit code {code}{name}\n{self._tail(rank)}")
        if waiting:
            limit = f"{timeout:g} s" if not errors and not dead else f"{GRACE_SECONDS:g} s more"
            lines.append(f"--- still running after {limit}: rank {', '.join(map(str, waiting))}")
            lines += [f"rank {rank} stands at\n{self._tail(rank)}" for rank in waiting]
        # A death is the cause of what the other ranks then raise ("connection closed by peer").
        kind, rank = ("died", next(iter(dead))) if dead else ("raised", next(iter(errors), None))
        if rank is None:
            kind, rank = "timeout", waiting[0]
        error, message, _ = errors.get(rank, ("", "", ""))
        return CaseFailure(case, kind, rank, error, message, "\n".join(lines), dead)

    def _dump_stacks(self, ranks: list[int]) -> None:
        if not hasattr(signal, "SIGUSR1"):
            return
        for rank in ranks:
            if self._ranks[rank].is_alive():
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)

    def _tail(self, rank: int) -> str:
        text = self._logs[rank].read_text(encoding="utf-8", errors="replace") if self._logs[rank].exists() else ""
        return text[-LOG_TAIL:].rstrip() or "(no output)"

    def _ensure_started(self) -> None:
        if self._ranks and all(process.is_alive() for process in self._ranks):
            return
        self.close()
        from torch.distributed import TCPStore

        from .worker import worker_main

        self.starts += 1
        self._folder = tempfile.mkdtemp(prefix="workers-")
        # The store lives here, not in rank 0: whoever dies, the others can still be asked and told.
        self._store = TCPStore(
            "127.0.0.1", 0, self.world_size, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        context = _context()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            log = Path(self._folder) / f"rank{rank}.log"
            args = (there, rank, self.world_size, self._store.port, str(log))
            # Not a daemon: those may not start processes of their own, and a DataLoader's workers are such.
            name = f"rank{rank}of{self.world_size}"
            process = context.Process(target=worker_main, args=args, name=name, daemon=False)
            _start(process)
            there.close()
            self._ranks.append(process)
            self._conns.append(here)
            self._logs.append(log)
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        for rank, conn in enumerate(self._conns):
            try:
                ready = conn.poll(max(0.0, deadline - time.monotonic())) and conn.recv_bytes()
            except (EOFError, OSError):
                ready = None
            if not ready:
                report = f"rank {rank} of {self.world_size} did not start:\n{self._tail(rank)}"
                self.close()
                raise WorkerFailure(CaseFailure("start", "died", rank, report=report))

    def close(self) -> None:
        """Kill the workers; the next case starts new ones."""
        for process in self._ranks:
            if process.is_alive():
                process.kill()
        for process in self._ranks:
            process.join(10)
        for conn in self._conns:
            conn.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks, self._conns, self._logs, self._folder, self._store = [], [], [], None, None


def _context():
    """Forked from a server that has torch imported; where that does not exist (Windows), spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    return context


def _start(process) -> None:
    """Start with the project's root importable in the server, which does not take over this process's ``sys.path``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ROOT if before is None else os.pathsep.join((ROOT, before))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


_pools: "OrderedDict[int, WorkerPool]" = OrderedDict()


def get_pool(world_size: int) -> WorkerPool:
    """The pool of this world size; at most ``MAX_ALIVE`` keep their processes, those used last."""
    pool = _pools.setdefault(world_size, WorkerPool(world_size))
    _pools.move_to_end(world_size)
    for other in list(_pools.values())[:-MAX_ALIVE]:
        other.close()
    return pool


def run_workers(world_size: int, fn: Callable, timeout: float = 60, **kwargs: Any) -> list:
    """``fn(rank, world_size, **kwargs)`` on every rank of a pool: the results by rank."""
    return get_pool(world_size).run(fn, timeout, **kwargs)


def run_cases(world_size: int, fn: Callable, cases: dict[str, dict], timeout: float = 60) -> dict[str, Any]:
    """See :meth:`WorkerPool.run_cases`."""
    return get_pool(world_size).run_cases(fn, cases, timeout)


def close_pools() -> None:
    """End every worker."""
    for pool in _pools.values():
        pool.close()


atexit.register(close_pools)
