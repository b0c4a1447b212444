"""How an ``IterableDataset`` is split over ranks and workers: without loss, without repetition, in equal numbers of steps."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from .randomness import RandomStream, derive_seed, seed_cpu_generators

_END = object()


@contextlib.contextmanager
def _outside_a_worker() -> Iterator[None]:
    """Inside, ``get_worker_info()`` is None, so that a dataset that splits itself by worker yields its whole stream."""
    saved, _torch_worker._worker_info = _torch_worker._worker_info, None
    try:
        yield
    finally:
        _torch_worker._worker_info = saved


class SplitStream(IterableDataset):
    """The part of a stream that one worker of one rank turns into batches.

    The stream is cut into groups of ``num_replicas * batch_size`` samples: one group is one global batch. A rank deals itself
    every ``num_replicas``-th sample of a group; workers take the groups in turn, which is the order in which torch's loader
    collects their batches. The last group may be short: it is dealt the same way, so that some ranks get one sample more than
    others, unless it has fewer samples than there are ranks, in which case it is dropped (at most ``num_replicas - 1``
    samples); with ``drop_last`` a short group is always dropped.

    Every worker of every rank reads the stream from its beginning and keeps its own part, so the dataset must yield the same
    samples everywhere. Random numbers it draws from the default generators are therefore seeded equally everywhere, from
    (seed, epoch); what a collate function draws is seeded by batch and differs.

    Args:
        dataset: what to read; its ``set_epoch(epoch)`` is called if it has one.
        place: int64 tensor [epoch, consumed], in shared memory where workers outlive an epoch; read when an iteration begins.
        seed_batches: seed the generators before each batch is collated.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        place: torch.Tensor,
        num_replicas: int,
        rank: int,
        batch_size: int,
        drop_last: bool,
        seed: int,
        seed_batches: bool,
    ):
        self.dataset = dataset
        self.place = place
        self.num_replicas = num_replicas
        self.rank = rank
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.seed_batches = seed_batches

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn reads the user's attributes through get_worker_info().dataset.
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        epoch, consumed = self.place.tolist()
        return self._samples(epoch, consumed, worker, workers)

    def _samples(self, epoch: int, consumed: int, worker: int, workers: int) -> Iterator[Any]:
        """The samples of this worker's batches, one batch after the other."""
        stream = RandomStream(derive_seed(self.seed, epoch, "stream"))
        with _outside_a_worker(), stream:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            source = iter(self.dataset)
            for _ in itertools.islice(source, consumed):
                pass
        whole = self.num_replicas * self.batch_size
        for group in itertools.count():
            with _outside_a_worker(), stream:
                samples, size = self._read_group(source, whole)
            if group % workers == worker and (size == whole or (size >= self.num_replicas and not self.drop_last)):
                if self.seed_batches:
                    seed_cpu_generators(derive_seed(self.seed, epoch, self.rank, consumed + group * whole))
                yield from samples
            if size < whole:
                return

    def _read_group(self, source: Iterator[Any], whole: int) -> tuple[list[Any], int]:
        """(this rank's samples of the next group, the number of samples in the group)."""
        samples = []
        for number in range(whole):
            sample = next(source, _END)
            if sample is _END:
                return samples, number
            if number % self.num_replicas == self.rank:
                samples.append(sample)
        return samples, whole

    def steps(self) -> int:
        """Batches of a whole epoch; needs a dataset with a length."""
        full, rest = divmod(len(self.dataset), self.num_replicas * self.batch_size)
        return full + int(rest >= self.num_replicas and not self.drop_last)
