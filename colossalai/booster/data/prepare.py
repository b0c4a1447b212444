"""``prepare_dataloader``: the one way in which every plugin turns a dataset into this rank's batches."""

import inspect
import numbers
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Sampler

from colossalai.utils.errors import ConfigError

from .loader import StatefulDataLoader
from .sampler import StatefulDistributedSampler

_REFUSED = {
    "sampler": "pass the class as distributed_sampler_cls, so that each rank gets its own part",
    "batch_sampler": "pass batch_size and a sampler class as distributed_sampler_cls, so that each rank gets its own part",
}


def prepare_dataloader(
    dataset: Dataset,
    batch_size: int,
    num_replicas: int,
    rank: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: type[Sampler] | None = None,
    **kwargs: Any,
) -> StatefulDataLoader:
    """Build the loader of one rank: every sample goes to exactly one rank and all ranks take the same number of steps.

    A map-style dataset is dealt out by ``StatefulDistributedSampler``, an ``IterableDataset`` by ``SplitStream``; see there
    for what happens to samples that do not divide evenly.

    Args:
        dataset: has ``__len__`` and ``__getitem__``, or is an ``IterableDataset``.
        batch_size: samples per step *of this rank*.
        num_replicas, rank: how many ranks share the data, and which of them this is.
        shuffle: draw a new order each epoch; only for map-style datasets.
        seed: of the order (with the epoch, ``seed + epoch``) and of all random numbers in reading and collating.
        drop_last: drop samples that do not fill a batch on every rank.
        distributed_sampler_cls: called with ``dataset``, ``num_replicas``, ``rank``, ``shuffle`` and, where its signature has
            them, ``seed`` and ``drop_last``.
        kwargs: anything else torch's ``DataLoader`` takes (``collate_fn``, ``persistent_workers``, ``prefetch_factor``, ...).

    Errors: ``ConfigError`` that names the argument.
    """
    _check(dataset, batch_size, num_replicas, rank, seed)
    for name, way_out in _REFUSED.items():
        if kwargs.pop(name, None) is not None:
            raise ConfigError(f"{name}= is not taken by prepare_dataloader: {way_out}, or build a torch DataLoader yourself")
    if not kwargs.get("in_order", True):
        raise ConfigError("in_order=False is not taken: the loader could not say which samples are done; leave it at True")
    sampler = None
    if isinstance(dataset, IterableDataset):
        _check_stream(shuffle, distributed_sampler_cls)
    else:
        sampler_cls = distributed_sampler_cls or StatefulDistributedSampler
        options = {"num_replicas": num_replicas, "rank": rank, "shuffle": shuffle}
        sampler = sampler_cls(dataset, **options, **_accepted(sampler_cls, {"seed": int(seed), "drop_last": drop_last}))
    return StatefulDataLoader(
        dataset,
        int(batch_size),  # a numpy integer would go into the state, which holds primitives only
        sampler=sampler,
        num_replicas=num_replicas,
        rank=rank,
        seed=int(seed),
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **kwargs,
    )


def _accepted(sampler_cls: type[Sampler], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that the class has in its signature."""
    parameters = inspect.signature(sampler_cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def _check_stream(shuffle: bool, distributed_sampler_cls: type[Sampler] | None) -> None:
    if shuffle:
        raise ConfigError(
            "shuffle=True has no meaning for an IterableDataset, which comes in its own order: shuffle inside the dataset "
            "(its random numbers are seeded by seed and epoch, equally on all ranks) and leave shuffle=False"
        )
    if distributed_sampler_cls is not None:
        raise ConfigError("distributed_sampler_cls needs indices, an IterableDataset has none: leave it out")


def _check(dataset: Dataset, batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
    if not isinstance(dataset, IterableDataset) and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}: give one with __len__ and __getitem__, or a torch IterableDataset"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("num_replicas", num_replicas, 1), ("seed", seed, 0)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"rank={rank} is not one of the {num_replicas} ranks 0 to {num_replicas - 1}")
