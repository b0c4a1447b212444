"""Start the agents of a job, watch them to their end, and stop all of them if one fails or a signal arrives."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from colossalai.utils.errors import ConfigError

POLL = 0.1  # seconds between looks
GRACE = 10.0  # seconds the other agents get, after one failed, to end by themselves and say what they saw
STOP = 40.0  # seconds an agent gets to stop its workers; torch's own agent kills them after 30
TAIL = 64 * 1024  # bytes of an agent's error output kept to look for a failed rendezvous
_RENDEZVOUS = re.compile(rb"_rendezvous\b.*(DistNetworkError|DistStoreError|Rendezvous\w*Error)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One agent to start: ``remote`` if it is an ssh client, which passes no signal on."""

    host: str
    argv: Sequence[str]
    remote: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one agent ended: its exit code (negative: the signal that ended it), and whether the hosts failed to meet."""

    host: str
    code: int
    rendezvous_failed: bool = False


class _Agent:
    """A running agent. With ``watch`` its error output passes through here, to recognise a failed rendezvous."""

    def __init__(self, command: Command, env: Mapping[str, str], watch: bool) -> None:
        self.command = command
        self.tail = b""
        pipe = subprocess.PIPE
        try:
            # Its own session: Ctrl-C in a terminal reaches only this process, which passes it on once. Twice would
            # break off the agent's orderly stop and leave workers behind.
            self.process = subprocess.Popen(
                list(command.argv),
                env=dict(env),
                stdin=pipe if command.remote else None,
                stderr=pipe if watch else None,
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command.argv[0]!r} for host {command.host}: {error}") from error
        self._reader = threading.Thread(target=self._pass_on, daemon=True) if watch else None
        if self._reader:
            self._reader.start()

    def _pass_on(self) -> None:
        source = self.process.stderr.fileno()
        while chunk := os.read(source, 65536):
            self.tail = (self.tail + chunk)[-TAIL:]
            while chunk:
                chunk = chunk[os.write(2, chunk) :]

    def stop(self, signum: int) -> None:
        if self.process.poll() is not None:
            return
        if self.command.remote:
            self._close_input()  # the watcher at the other end stops the agent
        elif os.name == "posix":
            self.process.send_signal(signum)
        else:
            self.process.terminate()

    def kill(self) -> None:
        """End it now, and its workers, which live in sessions of their own."""
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            except OSError:
                pass

    def _close_input(self) -> None:
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def finish(self) -> Outcome:
        code = self.process.wait()
        if self.command.remote:
            self._close_input()
        if self._reader:
            self._reader.join(timeout=5)
        return Outcome(self.command.host, code, code != 0 and bool(_RENDEZVOUS.search(self.tail)))


def _descendants(pid: int) -> list[int]:
    """Processes below ``pid``, deepest last; empty where the system has no /proc."""
    children: dict[int, list[int]] = {}
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for entry in entries:
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(entry)
    found = list(children.get(pid, []))
    for child in found:  # grows while it is walked
        found.extend(children.get(child, []))
    return found


class _Signals:
    """Remembers the signals that ask the job to stop, in place of Python's own reaction."""

    NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")

    def __init__(self) -> None:
        self.last: int | None = None
        self.count = 0

    def __call__(self, signum: int, frame: object) -> None:
        self.last, self.count = signum, self.count + 1

    @contextmanager
    def caught(self) -> Iterator["_Signals"]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield self
            return
        known = [getattr(signal, name) for name in self.NAMES if hasattr(signal, name)]
        before = {number: signal.signal(number, self) for number in known}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_agents(commands: Sequence[Command], env: Mapping[str, str], watch: bool = False) -> tuple[list[Outcome], int | None]:
    """Run the commands side by side until all have ended.

    If one fails, the others get GRACE seconds to end by themselves and are then stopped. A first signal is passed on to
    all, a second one ends them at once. Nothing outlives this call.

    Returns:
        How each ended, in order, and the signal that stopped the job (None if none did).
    """
    agents: list[_Agent] = []
    with _Signals().caught() as signals:
        try:
            for command in commands:
                agents.append(_Agent(command, env, watch))
            _watch(agents, signals)
        finally:
            for agent in agents:
                if agent.process.poll() is None:
                    agent.kill()
    return [agent.finish() for agent in agents], signals.last


def _watch(agents: Sequence[_Agent], signals: _Signals) -> None:
    stop_at = kill_at = None
    passed_on = False
    while any(agent.process.poll() is None for agent in agents):
        now = time.monotonic()
        if signals.count and not passed_on:
            passed_on, kill_at = True, now + STOP
            for agent in agents:
                agent.stop(signals.last)
        if signals.count > 1 or (kill_at is not None and now > kill_at):
            return
        failed = any(agent.process.poll() not in (None, 0) for agent in agents)
        if failed and stop_at is None:
            stop_at = now + GRACE
        if stop_at is not None and now > stop_at and kill_at is None:
            kill_at = now + STOP
            for agent in agents:
                agent.stop(signal.SIGTERM)
        time.sleep(POLL)


def report(outcomes: Sequence[Outcome], out=None) -> int:
    """Print how each host ended; return the exit status of the job: 1 if any failed, else 0."""
    out = out or sys.stdout
    print("\n====== Training on All Nodes =====", file=out)
    for outcome in outcomes:
        print(f"{outcome.host}: " + ("success" if outcome.code == 0 else f"failure ({describe(outcome.code)})"), file=out)
    print("\n====== Stopping All Nodes =====", file=out)
    for outcome in outcomes:
        print(f"{outcome.host}: finish", file=out)
    out.flush()
    return int(any(outcome.code for outcome in outcomes))


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
