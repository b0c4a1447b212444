"""A ``DataLoader`` that knows how many batches it has delivered, and can go on from there."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from colossalai.utils.errors import CheckpointError

from .randomness import derive_seed, seed_cpu_generators, untouched_generators
from .sampler import StatefulDistributedSampler
from .stream import SplitStream


class _SeededItems(Dataset):
    """What a fetcher reads instead of a map-style dataset: seeds the generators, then reads the batch."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, batch: tuple[int, list]) -> list:
        seed, indices = batch
        seed_cpu_generators(seed)
        read_many = getattr(self.dataset, "__getitems__", None)
        return read_many(indices) if read_many else [self.dataset[index] for index in indices]


class _Batches:
    """The batch sampler as a fetcher sees it: without the batches to skip, each with its seed where the loader seeds."""

    def __init__(self, batch_sampler: Sampler, progress: "_Progress"):
        self.batch_sampler = batch_sampler
        self.progress = progress

    def __iter__(self) -> Iterator[Any]:
        # A plain function, so that the place is read when the iteration begins, not at the first batch.
        progress = self.progress
        batches = itertools.islice(self.batch_sampler, progress.skip, None)
        if progress.seed is None:
            return batches
        key = (progress.seed, progress.epoch, progress.rank)
        return ((derive_seed(*key, position), batch) for position, batch in zip(progress.positions(), batches, strict=False))

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _Progress:
    """The place of the iteration that runs now. Shared by loader and batch sampler, so that neither holds the other alive."""

    def __init__(self, seed: int | None, rank: int, samples_per_step: int):
        self.seed = seed  # None: batches are not seeded
        self.rank = rank
        self.samples_per_step = samples_per_step  # over all ranks
        self.begin(0, 0, 0)

    def begin(self, epoch: int, start: int, skip: int) -> None:
        self.ticket: object | None = None  # held by the iterator whose batches count
        self.length: int | None = None  # batches of that iterator
        self.choices = 0  # calls of set_epoch before it began
        self.epoch = epoch
        self.start = start  # samples of the epoch, over all ranks, done before this iteration
        self.skip = skip  # batches to leave out, where the sampler cannot start in the middle
        self.delivered = 0  # batches

    def positions(self) -> Iterator[int]:
        return itertools.count(self.start, self.samples_per_step)


class _Delivery:
    """An iterator over batches that counts those handed out; what workers have read ahead does not count."""

    def __init__(self, loader: "StatefulDataLoader", batches: Iterator[Any], length: int | None):
        self._loader = loader
        self._batches = batches
        self._length = length
        # The loader knows this iterator by its ticket only: workers end with the iterator, not with the loader.
        self.ticket = object()
        # Without workers a batch is read in this process, whose generators belong to the model.
        own_process = loader.num_workers == 0 and loader.seeds_batches
        self._guard = untouched_generators if own_process else contextlib.nullcontext

    def __iter__(self) -> "_Delivery":
        return self

    def __next__(self) -> Any:
        try:
            with self._guard():
                batch = next(self._batches)
        except StopIteration:
            self._loader._finish(self)
            raise
        self._loader._count(self)
        return batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the IterableDataset has no len(), so the number of batches is unknown")
        return self._length


class StatefulDataLoader(DataLoader):
    """A ``DataLoader`` over this rank's part of a dataset, with ``state_dict`` and ``load_state_dict``.

    Epochs. A pass that delivers its last batch is followed by the next epoch, which is shuffled anew; ``set_epoch`` (of the
    loader or of its sampler) chooses another one. Breaking out of a pass leaves the epoch as it is, and the next ``iter`` begins
    it again. ``len(loader)`` is the number of batches of a whole epoch, ``len(iter(loader))`` of what is left of it.

    State. ``state_dict()`` counts batches delivered, not those that workers have read ahead, and counts them in samples over all
    ranks: ``load_state_dict`` continues in mid-epoch on another number of ranks and with another batch size, and the rest of the
    epoch comes in the order it would have had. The next ``iter`` continues there. An ``IterableDataset`` is read again up to
    the place and the samples are thrown away. A sampler class of the user's own is advanced batch by batch, which needs the
    same number of ranks and batch size.

    Randomness. Each batch is read and collated with Python's, numpy's and torch's CPU generators seeded from (seed, epoch, rank,
    place of the batch): different in every worker, on every rank and in every epoch, the same after a resume and for any number
    of workers; the trainer's own generators are left alone. Whoever passes ``worker_init_fn`` or ``generator`` takes the
    randomness into his own hands, and batches are then not seeded.

    Args:
        dataset, batch_size, drop_last, kwargs: as in torch.
        sampler: indices of this rank; None for an ``IterableDataset``, which is split by ``SplitStream``.
        num_replicas, rank: how many ranks share the data, and which one this is.
        seed: of everything random here but the sampler's order.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        sampler: Sampler | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 1024,
        drop_last: bool = False,
        **kwargs: Any,
    ):
        self._own_generator = kwargs.get("generator") is None
        self.seeds_batches = self._own_generator and kwargs.get("worker_init_fn") is None
        if self._own_generator:
            # torch draws the workers' base seed from the global generator unless it is given another one.
            kwargs["generator"] = torch.Generator()
        self._seed = seed
        self._num_replicas = num_replicas
        self._epoch = 0
        self._choices = 0
        self._resume = (0, 0)  # (epoch, samples done of it), where the sampler does not hold this itself
        self._progress = _Progress(seed if self.seeds_batches else None, rank, num_replicas * batch_size)
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last, **kwargs)
        self._stream: SplitStream | None = None
        if isinstance(dataset, IterableDataset):
            place = torch.zeros(2, dtype=torch.int64).share_memory_()
            self._stream = SplitStream(self.dataset, place, num_replicas, rank, batch_size, drop_last, seed, self.seeds_batches)

    # --- epochs -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the next ``iter`` begins."""
        return getattr(self.sampler, "epoch", self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter``; another one than the present begins with its first batch."""
        self._epoch = epoch
        self._choices += 1
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _start(self) -> int:
        """Samples of the present epoch, over all ranks, that the next ``iter`` leaves out."""
        if isinstance(self.sampler, StatefulDistributedSampler):
            return self.sampler.consumed
        epoch, consumed = self._resume
        return consumed if epoch == self.epoch else 0

    # --- iteration ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> _Delivery:
        progress = self._progress
        if self._ran_dry():
            self.set_epoch(progress.epoch + 1)
        start = self._start()
        resumes_itself = self._stream is not None or isinstance(self.sampler, StatefulDistributedSampler)
        progress.begin(self.epoch, start, 0 if resumes_itself else start // progress.samples_per_step)
        if self._own_generator:
            self.generator.manual_seed(derive_seed(self._seed, progress.epoch, progress.rank, "workers"))
        if self._stream is not None:
            if not self.persistent_workers:  # workers of an earlier iteration may still have to read their own place
                self._stream.place = torch.zeros(2, dtype=torch.int64)
            self._stream.place.copy_(torch.tensor([progress.epoch, start]))
        progress.length, progress.choices = self._remaining(), self._all_choices()
        delivery = _Delivery(self, super().__iter__(), progress.length)
        progress.ticket = delivery.ticket
        return delivery

    def _ran_dry(self) -> bool:
        """The iteration before this one delivered its last batch, but was not asked for one more (``for _ in range(n): next(it)``),
        and nobody has chosen an epoch since."""
        progress = self._progress
        known = progress.length is not None
        return known and progress.delivered >= progress.length and progress.choices == self._all_choices()

    def _all_choices(self) -> int:
        return self._choices + getattr(self.sampler, "choices", 0)

    def _get_iterator(self):
        # torch's iterators read `dataset` once, here. The attribute itself stays what the user gave.
        if self._stream is None and not self.seeds_batches:
            return super()._get_iterator()
        users = self.__dict__["dataset"]
        self.__dict__["dataset"] = self._stream if self._stream is not None else _SeededItems(users)
        try:
            return super()._get_iterator()
        finally:
            self.__dict__["dataset"] = users

    @property
    def _index_sampler(self):
        if self._stream is not None:
            return self.batch_sampler
        return _Batches(self.batch_sampler, self._progress)

    def __len__(self) -> int:
        if self._stream is not None:
            return self._stream.steps()
        if not isinstance(self.sampler, StatefulDistributedSampler):
            return len(self.batch_sampler)
        samples = self.sampler.num_samples
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _remaining(self) -> int | None:
        if self._stream is None:
            return max(len(self.batch_sampler) - self._progress.skip, 0)
        if not hasattr(self.dataset, "__len__"):
            return None
        return max(len(self) - self._progress.start // self._progress.samples_per_step, 0)

    def _count(self, delivery: _Delivery) -> None:
        if self._progress.ticket is delivery.ticket:
            self._progress.delivered += 1

    def _finish(self, delivery: _Delivery) -> None:
        progress = self._progress
        if progress.ticket is not delivery.ticket:
            return
        if self.epoch == progress.epoch:
            self.set_epoch(progress.epoch + 1)
        progress.begin(self.epoch, 0, 0)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: a flat dictionary of primitives, the same on every rank."""
        progress = self._progress
        delivered = progress.delivered if self.epoch == progress.epoch else 0
        state = {
            "epoch": self.epoch,
            "consumed": self._start() + delivered * progress.samples_per_step,
            "num_replicas": self._num_replicas,
            "batch_size": self.batch_size,
        }
        if isinstance(self.sampler, StatefulDistributedSampler):
            state |= self.sampler.state_dict(delivered * self.batch_size)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter`` continue where ``state`` was taken.

        Errors: ``CheckpointError`` if the state is of another order (dataset length, shuffle, seed), or of another number of
        ranks or batch size where the sampler cannot translate them.
        """
        try:
            epoch, consumed = state["epoch"], state["consumed"]
            if isinstance(self.sampler, StatefulDistributedSampler):
                self.sampler.load_state_dict(state)
            elif self._stream is None:
                self._check_same_split(state)
        except KeyError as error:
            raise CheckpointError(
                f"the dataloader state has no entry {error}: it was taken from another kind of loader; pass the state of a "
                f"loader built by prepare_dataloader over the same dataset and sampler"
            ) from None
        self.set_epoch(epoch)
        self._resume = (epoch, consumed)
        self._progress.begin(self.epoch, self._start(), 0)

    def _check_same_split(self, state: dict[str, Any]) -> None:
        mine = {"num_replicas": self._num_replicas, "batch_size": self.batch_size}
        for name, value in mine.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the dataloader state was saved with {name}={state[name]}, now it is {value}: a sampler of type "
                    f"{type(self.sampler).__name__} resumes only on the same split; use StatefulDistributedSampler (the "
                    f"default, leave distributed_sampler_cls out) to change the number of ranks or the batch size"
                )
