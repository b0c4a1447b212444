"""What a way of mixed precision offers the Booster."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from colossalai.interface import OptimizerWrapper


class MixedPrecision(ABC):
    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Callable | None = None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable | None]:
        """The three, wrapped for this precision."""
