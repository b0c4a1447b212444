"""Starting processes for a test, repeating a test, and small stand-ins."""

import functools
import gc
import re
import socket
import time
import unittest
from collections.abc import Callable, Iterable
from typing import Any

from ..accelerator import get_accelerator
from ..utils.errors import ConfigError, DisagreementError
from ..utils.limits import group_timeout


def parameterize(argument: str, values: Iterable[Any]) -> Callable:
    """Decorator: call the function once for every value of ``values``, passed as keyword ``argument``.

    It can be stacked and, unlike pytest's, also works inside a spawned process. The decorated function returns None. An
    error names the value it came with.
    """
    values = list(values)

    def decorate(func: Callable) -> Callable:
        def run_all(*args: Any, **kwargs: Any) -> None:
            for value in values:
                try:
                    func(*args, **{argument: value}, **kwargs)
                except Exception as error:
                    if hasattr(error, "add_note"):  # since Python 3.11
                        error.add_note(f"with {argument}={value!r}")
                    raise

        # Not functools.wraps: pytest would look through it and ask for a fixture called like the argument.
        run_all.__name__, run_all.__qualname__, run_all.__module__ = func.__name__, func.__qualname__, func.__module__
        run_all.__doc__ = func.__doc__
        return run_all

    return decorate


def rerun_on_exception(
    exception_type: type[Exception] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable:
    """Decorator: call the function again when it raises ``exception_type``.

    Args:
        pattern: a regular expression; only errors whose text it matches somewhere count.
        max_try: how often the function is called at most; None for no limit. The last error is raised.
    """
    if max_try is not None and (not isinstance(max_try, int) or max_try < 1):
        raise ConfigError(f"max_try={max_try!r}: give a positive integer, or None for no limit")
    matches = re.compile(pattern, re.DOTALL).search if pattern is not None else lambda text: True

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            tries = 0
            while True:
                tries += 1
                try:
                    return func(*args, **kwargs)
                except exception_type as error:
                    if not matches(str(error)) or tries == max_try:
                        raise
                    print(f"{func.__name__}: try {tries} of {max_try or 'any number'} failed ({error}), trying again")

        return run

    return decorate


def rerun_if_address_is_in_use() -> Callable:
    """Decorator: call the function again, up to five times, when its port was taken between choosing and binding it."""
    return rerun_on_exception(Exception, r"(?i)address already in use|EADDRINUSE")


def free_port() -> int:
    """A TCP port on this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def spawn(func: Callable, nprocs: int = 1, **kwargs: Any) -> None:
    """Run ``func(rank, world_size, port, **kwargs)`` in ``nprocs`` new processes and wait for them.

    ``func`` must be importable (no lambda, no inner function); ``port`` is a free one. All processes end when one
    fails. The wait is bounded by COLOSSALAI_TIMEOUT seconds, 10 minutes unless set.

    Raises ``torch.multiprocessing.ProcessRaisedException`` with the traceback of the process that raised first,
    ``ProcessExitedException`` with the exit code of one that died, and DisagreementError where the time was over.
    """
    import torch.multiprocessing as mp

    if nprocs < 1:
        raise ConfigError(f"nprocs={nprocs}: start at least one process")
    limit = group_timeout().total_seconds()
    call = functools.partial(func, world_size=nprocs, port=free_port(), **kwargs)
    context = mp.start_processes(_Call(call), nprocs=nprocs, join=False, start_method="spawn")
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=max(0.1, min(5.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                raise DisagreementError(
                    f"spawn: {_name(func)} was still running on ranks {alive} of {nprocs} after {limit:g} s; "
                    "set COLOSSALAI_TIMEOUT to allow more seconds"
                )
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join(10)


class _Call:
    """``call`` with the rank as first argument; a class, because the processes unpickle it."""

    def __init__(self, call: Callable) -> None:
        self.call = call

    def __call__(self, rank: int) -> None:
        self.call(rank)


def _name(func: Callable) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__qualname__", repr(func))


def clear_cache_before_run() -> Callable:
    """Decorator: free the accelerator's cached memory and reset its peaks before the function runs."""

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            accelerator = get_accelerator()
            gc.collect()
            accelerator.empty_cache()
            accelerator.reset_peak_memory_stats()
            accelerator.reset_max_memory_allocated()
            accelerator.reset_max_memory_cached()
            accelerator.synchronize()
            return func(*args, **kwargs)

        return run

    return decorate


def skip_if_not_enough_gpus(min_gpus: int) -> Callable:
    """Decorator: skip the test (``unittest.SkipTest``, which pytest knows) where there are fewer CUDA devices."""

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            import torch

            found = torch.cuda.device_count()
            if found < min_gpus:
                raise unittest.SkipTest(f"needs {min_gpus} GPUs, this machine has {found}")
            return func(*args, **kwargs)

        return run

    return decorate


class DummyDataloader:
    """Yields ``length`` batches, each made by a call of ``data_gen_fn()``."""

    def __init__(self, data_gen_fn: Callable[[], Any], length: int = 10) -> None:
        self.data_gen_fn = data_gen_fn
        self.length = length
        self.step = 0

    def __iter__(self) -> "DummyDataloader":
        self.step = 0
        return self

    def __next__(self) -> Any:
        if self.step >= self.length:
            raise StopIteration
        self.step += 1
        return self.data_gen_fn()

    def __len__(self) -> int:
        return self.length
