"""What every plugin offers the Booster."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import OptimizerWrapper


class Plugin(ABC):
    """One way to spread a model over the ranks."""

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Names of the accelerators it runs on."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Values its ``precision`` (or the Booster's ``mixed_precision``) may have."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Whether precision is the plugin's; else it is the Booster's ``mixed_precision``."""

    @abstractmethod
    def control_device(self) -> bool:
        """Whether the plugin moves the model; else the Booster's ``device`` does."""

    @abstractmethod
    def support_no_sync(self) -> bool:
        """Whether backward may run without reducing gradients."""

    @abstractmethod
    def support_lora(self) -> bool:
        """Whether ``Booster.enable_lora`` works."""

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap what is given; what is None stays None."""

    @abstractmethod
    def control_checkpoint_io(self) -> bool:
        """Whether the plugin has its own checkpoint reader and writer."""

    @abstractmethod
    def get_checkpoint_io(self) -> CheckpointIO:
        """The reader and writer of what ``configure`` returned."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> AbstractContextManager:
        """A context in which backward only adds to this rank's gradients."""

    @abstractmethod
    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """The model with adapters, before boost."""

    @abstractmethod
    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        **kwargs,
    ) -> DataLoader | Iterator:
        """A loader that gives each data-parallel rank its part of ``dataset``."""

    def agreement(self) -> dict[str, Any]:
        """What all ranks must have alike, by argument name; ``boost`` compares it before anything is communicated."""
        return {"plugin": type(self).__name__, **getattr(self, "arguments", {})}
