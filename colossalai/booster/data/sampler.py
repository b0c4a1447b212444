"""A distributed sampler whose position is global, so that it resumes on another number of ranks."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from colossalai.utils.errors import CheckpointError, ConfigError


class StatefulDistributedSampler(DistributedSampler):
    """Deals the indices of a dataset to ``num_replicas`` ranks, and can start anywhere in an epoch.

    The order of an epoch is that of torch's ``DistributedSampler``: a permutation drawn from ``seed + epoch`` (or 0, 1, 2, ...
    without ``shuffle``), dealt out like cards, rank ``r`` taking places ``r, r + num_replicas, ...``. One global batch is thus
    one stretch of that order, whatever the number of ranks, and "``consumed`` samples of epoch ``epoch`` are done" says
    everything there is to save.

    What does not divide by ``num_replicas`` is dropped at the end of the epoch with ``drop_last``, else made up by samples from
    its beginning, as in torch.

    Attributes:
        epoch: the epoch whose order is dealt.
        consumed: samples of this epoch, over all ranks, that are not dealt again.

    Errors: ``ConfigError`` for an empty dataset or a start outside it; ``CheckpointError`` from ``load_state_dict`` for a state
    of another order.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if len(dataset) == 0:
            raise ConfigError("dataset is empty: there is nothing to deal to the ranks; give a dataset with samples")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.consumed = 0
        self.choices = 0  # calls of set_epoch: lets a loader tell a chosen epoch from one that is over

    def order(self) -> torch.Tensor:
        """All indices in the order of this epoch, shape (len(dataset),), the same on every rank."""
        length = len(self.dataset)
        if not self.shuffle:
            return torch.arange(length)
        return torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        rest = order[self.consumed :]
        total = len(self) * self.num_replicas
        missing = total - len(rest)
        if missing > 0:
            rest = torch.cat([rest, order.repeat(math.ceil(missing / len(order)))[:missing]])
        return iter(rest[self.rank : total : self.num_replicas].tolist())

    def __len__(self) -> int:
        """Samples this rank still gets in this epoch."""
        rest = max(len(self.dataset) - self.consumed, 0)
        return rest // self.num_replicas if self.drop_last else math.ceil(rest / self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to deal. Another epoch than the present one is dealt from its beginning."""
        if epoch != self.epoch:
            self.consumed = 0
        self.epoch = epoch
        self.choices += 1

    def set_start_index(self, start_index: int) -> None:
        """Start this epoch at the ``start_index``-th sample of each rank (upstream's way to resume; needs the same number of
        ranks, ``load_state_dict`` does not)."""
        if not 0 <= start_index <= self.num_samples:
            raise ConfigError(f"start_index={start_index} is outside the epoch: each rank has {self.num_samples} samples")
        self.consumed = min(start_index * self.num_replicas, len(self.dataset))

    @property
    def start_index(self) -> int:
        """``consumed`` in samples of one rank."""
        return self.consumed // self.num_replicas

    def state_dict(self, delivered: int = 0) -> dict[str, Any]:
        """Where the sampler stands, in primitives.

        ``delivered``: samples of this rank that were used since the iteration began. The sampler cannot know them: a loader
        takes indices ahead of the batches it hands out.
        """
        return {
            "epoch": self.epoch,
            "consumed": min(self.consumed + delivered * self.num_replicas, len(self.dataset)),
            "length": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, on any number of ranks."""
        mine = self.state_dict()
        for name in ("length", "shuffle", "seed"):
            # Without shuffle the seed has no part in the order.
            if state[name] != mine[name] and not (name == "seed" and not self.shuffle):
                what = "the dataset's length" if name == "length" else name
                raise CheckpointError(
                    f"this sampler state has {what} {state[name]}, the loader has {mine[name]}: the order would not continue; "
                    f"build the loader as it was when the state was saved, or start a new epoch without loading the state"
                )
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
