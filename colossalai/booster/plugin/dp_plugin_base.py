"""What plugins share whose ranks all take different data."""

from torch.utils.data import DataLoader, Dataset

from colossalai import comm

from ..data import prepare_dataloader
from .plugin_base import Plugin


class DPPluginBase(Plugin):
    """A plugin under which every rank of the world is a data-parallel one."""

    def __init__(self) -> None:
        self.rank = comm.rank()
        self.world_size = comm.world_size()

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls=None,
        **kwargs,
    ) -> DataLoader:
        """The loader of this rank's part of ``dataset``, ``batch_size`` samples a step; see :func:`prepare_dataloader`."""
        return prepare_dataloader(
            dataset,
            batch_size,
            num_replicas=self.world_size,
            rank=self.rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            **kwargs,
        )
