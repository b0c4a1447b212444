"""Random numbers of data loading: derived from (seed, epoch, rank, position), and kept apart from the trainer's own.

The global generators belong to the model: outside a wrapped forward they are equal on all ranks. Reading a batch may draw from
them (an augmentation, a masking collator), so a batch is read on a stream of its own, seeded by where the batch stands. What it
draws then depends neither on how many batches were read before by this process nor on which worker reads it, and a resumed run
draws the same.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed mixed from the parts; any change in any part gives an unrelated seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's default CPU generators of this process."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed: that would also seed the accelerator, whose stream belongs to the model.
    torch.default_generator.manual_seed(seed)


def _capture() -> tuple:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(state: tuple) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


@contextlib.contextmanager
def untouched_generators() -> Iterator[None]:
    """Whatever is drawn inside leaves the default CPU generators as they were before."""
    outer = _capture()
    try:
        yield
    finally:
        _restore(outer)


class RandomStream:
    """A seeded stream that takes the place of the default CPU generators while the context is entered, and goes on where it
    stopped when it is entered again."""

    def __init__(self, seed: int):
        self._seed = seed
        self._state: tuple | None = None
        self._outer: tuple | None = None

    def __enter__(self) -> "RandomStream":
        self._outer = _capture()
        if self._state is None:
            seed_cpu_generators(self._seed)
        else:
            _restore(self._state)
        return self

    def __exit__(self, *exc_info) -> None:
        self._state = _capture()
        _restore(self._outer)
