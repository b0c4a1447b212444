"""What a plugin that cuts the model into pipeline stages offers in addition."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from colossalai.interface import OptimizerWrapper

from .plugin_base import Plugin


class PipelinePluginBase(Plugin):
    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Callable[[Any, Any], Any],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict:
        """Forward, and with an optimizer backward, of one batch through all stages: ``{"loss": ..., "outputs": ...}``."""
