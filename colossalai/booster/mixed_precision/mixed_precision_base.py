"""What a way of mixed precision offers the Booster."""

from abc import ABC, abstractmethod
from typing import Callable, Optional

from torch import nn
from torch.optim import Optimizer

from colossalai.interface import OptimizerWrapper


class MixedPrecision(ABC):
    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: Optional[Optimizer] = None, criterion: Optional[Callable] = None
    ) -> tuple[nn.Module, Optional[OptimizerWrapper], Optional[Callable]]:
        """The three, wrapped for this precision."""
