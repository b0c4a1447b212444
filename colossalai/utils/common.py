"""Helpers without a theme of their own."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..accelerator import get_accelerator

T = TypeVar("T")


def get_current_device() -> torch.device:
    """The device this process computes on."""
    return get_accelerator().get_current_device()


def set_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch (the CPU's and every device's)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits only
    torch.manual_seed(seed)


def ensure_path_exists(filename: str | Path) -> None:
    """Create the folder a file is to be put in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def conditional_context(context_manager: AbstractContextManager[T], enable: bool = True) -> Iterator[T | None]:
    """Enter ``context_manager`` if ``enable``, else do nothing."""
    if not enable:
        yield None
        return
    with context_manager as value:
        yield value


def is_ddp_ignored(p: torch.Tensor) -> bool:
    """Whether data parallelism leaves this parameter alone (``p._ddp_to_ignore``)."""
    return getattr(p, "_ddp_to_ignore", False)


def disposable(func: Callable[..., T]) -> Callable[..., T | None]:
    """Make a function that runs at its first call and gives back None at all later ones."""
    done = False

    @functools.wraps(func)
    def once(*args: Any, **kwargs: Any) -> T | None:
        nonlocal done
        if done:
            return None
        done = True
        return func(*args, **kwargs)

    return once


def free_storage(data: torch.Tensor) -> None:
    """Release the memory of a tensor that owns its whole storage; its shape stays. Views are left alone."""
    storage = data.untyped_storage()
    if storage.size() > 0 and data.storage_offset() == 0 and storage.size() == data.numel() * data.element_size():
        storage.resize_(0)


def _cast_float(args: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of lists, tuples and dictionaries to ``dtype``; the rest is kept."""
    if isinstance(args, torch.Tensor):
        return args.to(dtype) if torch.is_floating_point(args) else args
    if isinstance(args, tuple) and hasattr(args, "_fields"):  # a named tuple takes its fields one by one
        return type(args)(*(_cast_float(item, dtype) for item in args))
    if isinstance(args, list | tuple):
        return type(args)(_cast_float(item, dtype) for item in args)
    if isinstance(args, dict):
        return {key: _cast_float(item, dtype) for key, item in args.items()}
    return args


def get_non_persistent_buffers_set(
    module: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> set[str]:
    """The full names of the buffers that ``state_dict`` leaves out.

    Args:
        memo: modules already seen, which are skipped if ``remove_duplicate``.
        prefix: put before every name.
    """
    memo = set() if memo is None else memo
    names: set[str] = set()
    for name, child in module.named_modules(memo=memo, prefix=prefix, remove_duplicate=remove_duplicate):
        names |= {f"{name}.{buffer}" if name else buffer for buffer in child._non_persistent_buffers_set}
    return names
