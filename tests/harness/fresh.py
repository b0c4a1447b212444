"""Processes that have joined no world yet, for tests of how one is joined."""

import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

from .pool import _context, _start

_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLOSSALAI_TIMEOUT")


def run_fresh(calls: list[tuple[Callable, dict[str, Any], dict[str, str]]], timeout: float = 60) -> list[Any]:
    """Run ``(function, kwargs, environment)`` in one new process each, at the same time.

    Gives their results in order; an exception comes back as ``(type names of its MRO, text, seconds)``. A process that
    outlives ``timeout`` seconds is killed and gives the string ``"timeout"``, one that dies ``"died"``.
    """
    context, started, results = _context(), [], []
    for function, kwargs, environment in calls:
        here, there = context.Pipe()
        process = context.Process(target=_body, args=(there, function, kwargs, environment))
        _start(process)
        there.close()
        started.append((process, here))
    deadline = time.monotonic() + timeout
    for _, here in started:
        if not here.poll(max(0.0, deadline - time.monotonic())):
            results.append("timeout")
        else:
            try:
                results.append(pickle.loads(here.recv_bytes()))
            except EOFError:
                results.append("died")
    for _, here in started:
        here.close()  # the sign to end: rank 0's store must outlive the others' use of it
    for process, _ in started:
        process.join(5)
        process.kill()
    return results


def failed(result: Any, kind: str) -> str:
    """The text of an exception of this type that ``run_fresh`` brought back; fails the test if it brought another."""
    assert isinstance(result, tuple) and kind in result[0], result
    return result[1]


def _body(conn, function: Callable, kwargs: dict[str, Any], environment: dict[str, str]) -> None:
    for name in _WORLD:
        os.environ.pop(name, None)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | environment)
    begun = time.monotonic()
    try:
        result = function(**kwargs)
    except BaseException as error:
        traceback.print_exc()
        result = [kind.__name__ for kind in type(error).__mro__], str(error), time.monotonic() - begun
    conn.send_bytes(pickle.dumps(result))
    try:
        conn.recv_bytes()
    except (EOFError, OSError):
        pass
    os._exit(0)
