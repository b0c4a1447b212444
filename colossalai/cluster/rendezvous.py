"""How the ranks of a new world find that they are all there, and agree on how many they are.

Everyone writes into the store that it has come, and what it takes the world size to be. Rank 0 judges: it waits for the
others, or for the first fault anyone finds, and writes a verdict that all ranks read. So every rank raises the same
sentence, at the same time, with the names of those who are missing.
"""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

_LOOK_SECONDS = 0.25  # how soon rank 0 notices a fault another rank has found
_GRACE_SECONDS = 3.0  # how much longer the others wait for the verdict than rank 0 for them


def await_listener(host: str, port: int, deadline: float) -> None:
    """Return when somebody listens at ``host:port``; raise the last OSError at ``deadline`` (of ``time.monotonic``)."""
    pause = 0.05
    while True:
        try:
            left = deadline - time.monotonic()
            with socket.create_connection((host, port), timeout=max(left, 0.1)):
                return
        except OSError:
            if time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


def gather_at(store: dist.Store, rank: int, world_size: int, limit: timedelta, where: str) -> None:
    """Return when all ranks have come to the store and agree on ``world_size``; raise RuntimeError if they do not.

    Args:
        store: a fresh store, or a fresh prefix of an older one.
        where: where and how long was waited, for the message.
    """
    if store.add(f"claims/{rank}", 1) > 1:
        raise RuntimeError(_object(store, f"two processes say they are rank {rank}; give every process a rank of its own"))
    store.set(f"arrived/{rank}", str(world_size))
    verdict = _judge(store, world_size, limit, where) if rank == 0 else _hear(store, rank, world_size, limit, where)
    if verdict:
        raise RuntimeError(f"launch: {verdict}")


def _object(store: dist.Store, fault: str) -> str:
    store.set("objection", fault)
    return f"launch: {fault}"


def _hear(store: dist.Store, rank: int, world_size: int, limit: timedelta, where: str) -> str:
    """The verdict of rank 0, empty if all is well."""
    try:
        of_first = int(store.get("arrived/0"))
        if of_first != world_size:
            _object(store, f"the processes disagree on world_size: rank 0 says {of_first}, rank {rank} says {world_size}")
        store.wait(["verdict"], limit + timedelta(seconds=_GRACE_SECONDS))
        verdict = store.get("verdict").decode()
        store.add("heard", 1)
    except RuntimeError as error:
        raise RuntimeError(f"launch: rank {rank} of {world_size} lost rank 0 {where}; see what rank 0 said") from error
    return verdict


def _judge(store: dist.Store, world_size: int, limit: timedelta, where: str) -> str:
    deadline = time.monotonic() + limit.total_seconds()
    keys = [f"arrived/{rank}" for rank in range(world_size)]
    missing, verdict, pause = set(), "", 0.002
    # Asked again and again: a wait of the store would not notice an objection, and complains on the screen.
    while not verdict and not store.check(keys):
        if store.check(["objection"]):
            verdict = store.get("objection").decode()
        elif time.monotonic() > deadline:
            missing = {rank for rank in range(world_size) if not store.check([keys[rank]])}
            if missing:
                verdict = (
                    f"{world_size} processes were expected, and rank(s) {', '.join(map(str, sorted(missing)))} did "
                    f"not come {where}. Were all processes started, and is world_size={world_size} right?"
                )
        time.sleep(pause)
        pause = min(pause * 2, _LOOK_SECONDS)
    if not verdict and (wrong := _disagreement(store, keys)):
        verdict = wrong
    store.set("verdict", verdict)
    if verdict:
        _linger(store, world_size - 1 - len(missing))
    return verdict


def _disagreement(store: dist.Store, keys: list[str]) -> str:
    """What the others take the world size to be, if it is not what rank 0 does."""
    for rank, stated in enumerate(store.multi_get(keys)):
        if int(stated) != len(keys):
            return f"the processes disagree on world_size: rank 0 says {len(keys)}, rank {rank} says {int(stated)}"
    return ""


def _linger(store: dist.Store, listeners: int) -> None:
    """Keep the store open until the others have heard the verdict, or a moment has passed."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while store.add("heard", 0) < listeners and time.monotonic() < deadline:
        time.sleep(0.01)
