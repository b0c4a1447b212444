"""The device of a Booster that has no plugin."""

import torch
from torch import nn

from colossalai.utils.errors import ConfigError

DEVICES = ("cpu", "cuda")


class Accelerator:
    """Moves a model to ``device``, "cpu" or "cuda"."""

    def __init__(self, device: str) -> None:
        if device not in DEVICES:
            raise ConfigError(f"device={device!r}: use one of {DEVICES}")
        self.device = device

    def bind(self) -> None:
        """Make this process's CUDA device the current one."""
        if self.device == "cuda":
            torch.cuda.set_device(torch.cuda.current_device())

    def configure_model(self, model: nn.Module) -> nn.Module:
        """The model, moved."""
        return model.to(torch.device(self.device))
