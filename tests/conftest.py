"""Shared by all tests: markers, the worker pools, and a time limit for each test."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.harness.limits import TEST_SECONDS, time_limit  # noqa: E402
from tests.harness.pool import close_pools, get_pool  # noqa: E402

MARKERS = (
    "gpu: needs a CUDA device; skipped where there is none",
    "fast: the two-minute subset (pytest -m fast)",
    "limit(seconds): this test's time limit, in place of the default",
)


def pytest_configure(config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_sessionstart(session) -> None:
    import torch

    torch.set_num_threads(1)  # as in the workers, whose numbers are compared with this process's


def pytest_sessionfinish(session) -> None:
    close_pools()


def _limit(item):
    marker = item.get_closest_marker("limit")
    return time_limit(float(marker.args[0]) if marker else TEST_SECONDS, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _limit(item):
        return (yield)


@pytest.fixture
def workers():
    """``workers(world_size)`` is the pool of that size; ``.run(fn, timeout=60, **kwargs)`` gives results by rank."""
    return get_pool
