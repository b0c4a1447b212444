from abc import ABC, abstractmethod
import torch
from torch import Tensor
from colossalai.accelerator import get_accelerator


class BaseGradScaler(ABC):
    def __init__(self, initial_scale: float, verbose: bool) -> None:
        self._value, self.verbose = float(initial_scale), verbose

    @property
    def scale(self) -> Tensor:
        return torch.tensor([self._value], device=get_accelerator().get_current_device())

    @property
    def inv_scale(self) -> Tensor:
        return 1.0 / self.scale

    def state_dict(self) -> dict:
        return {"scale": self._value}

    @abstractmethod
    def update(self, overflow: bool) -> None: ...
