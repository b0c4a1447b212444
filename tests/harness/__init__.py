"""What the tests share: worker pools, time limits, and the training runs that parity tests compare."""

from .pool import CaseFailure, WorkerFailure, WorkerPool, close_pools, get_pool, run_cases, run_workers

__all__ = ["CaseFailure", "WorkerFailure", "WorkerPool", "close_pools", "get_pool", "run_cases", "run_workers"]
