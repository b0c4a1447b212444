"""Counts collectives from outside the library, by standing in for ``torch.distributed``'s functions."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps

import torch
import torch.distributed as dist

# For each function, which argument (by position, by name) says how much is moved, and how many times it goes over the
# wire.
WATCHED = {
    "all_reduce": ((0, "tensor"), 2),
    "broadcast": ((0, "tensor"), 1),
    "all_to_all_single": ((1, "input"), 1),
    "reduce_scatter_tensor": ((1, "input"), 1),
    "reduce_scatter_single": ((1, "input"), 1),
    "all_gather_into_tensor": ((0, "output_tensor"), 1),
    "all_gather_single": ((0, "output_tensor"), 1),
    "all_gather": ((0, "tensor_list"), 1),
    "all_to_all": ((1, "input_tensor_list"), 1),
    "reduce": ((0, "tensor"), 1),
    "gather": ((0, "tensor"), 1),
    "scatter": ((0, "tensor"), 1),
    "send": ((0, "tensor"), 1),
    "isend": ((0, "tensor"), 1),
    "reduce_scatter": ((1, "input_list"), 1),
    "all_gather_object": (None, 0),
    "broadcast_object_list": (None, 0),
    "barrier": (None, 0),
}


@dataclass
class Seen:
    """Totals of what was called inside the block."""

    calls: Counter = field(default_factory=Counter)
    elements: Counter = field(default_factory=Counter)
    """By function; an all-reduce counts twice, being a reduce-scatter and an all-gather."""
    bytes: Counter = field(default_factory=Counter)
    """By function, each once: the payload."""


@contextmanager
def observe():
    """Everything that goes through ``torch.distributed`` inside the block."""
    seen = Seen()
    originals = {name: getattr(dist, name) for name in WATCHED if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _counting(name, original, seen))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counting(name: str, original, seen: Seen):
    place, factor = WATCHED[name]

    @wraps(original)
    def call(*args, **kwargs):
        seen.calls[name] += 1
        if place is not None:
            position, keyword = place
            payload = args[position] if len(args) > position else kwargs[keyword]
            tensors = [payload] if isinstance(payload, torch.Tensor) else payload
            seen.elements[name] += factor * sum(t.numel() for t in tensors)
            seen.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return original(*args, **kwargs)

    return call
