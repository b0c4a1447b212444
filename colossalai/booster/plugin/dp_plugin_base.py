"""What plugins share whose ranks all take different data."""

from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from colossalai import comm
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper
from colossalai.utils.errors import ConfigError

from ..data import prepare_dataloader
from ._common import lora_model
from .plugin_base import Plugin


class DPPluginBase(Plugin):
    """A plugin under which every rank of the world is a data-parallel one, on any device."""

    def __init__(self) -> None:
        self.rank = comm.rank()
        self.world_size = comm.world_size()
        self.lora_enabled = False

    def supported_devices(self) -> list[str]:
        return ["cuda", "npu", "cpu"]

    def control_device(self) -> bool:
        return True

    def control_checkpoint_io(self) -> bool:
        return True

    def get_checkpoint_io(self) -> CheckpointIO:
        return CheckpointIO()

    def support_no_sync(self) -> bool:
        return True

    def support_lora(self) -> bool:
        return True

    def enable_lora(
        self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None, bnb_quantization_config: Any = None
    ) -> nn.Module:
        if isinstance(model, ModelWrapper):
            raise ConfigError("enable_lora after boost: call it before boost")
        self.lora_enabled = True
        return lora_model(model, pretrained_dir, lora_config, bnb_quantization_config)

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
