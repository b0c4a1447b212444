"""The Booster: a model, an optimizer and a dataloader go in, the same come out spread over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossalai import comm
from colossalai.checkpoint_io import GeneralCheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper, get_pretrained_path, set_pretrained_path
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments

from .accelerator import Accelerator
from .mixed_precision import MixedPrecision, mixed_precision_factory
from .plugin.plugin_base import Plugin
from .plugin.pp_plugin_base import PipelinePluginBase


class Booster:
    """Spreads training over the ranks as its plugin says; without a plugin it trains on one device.

    Args:
        device: where the model goes, "cpu" or "cuda"; only where the plugin leaves it to the Booster. None leaves it.
        mixed_precision: "fp16" or "bf16" (torch's autocast), or a :class:`MixedPrecision`; only where the plugin leaves it.
        plugin: how the model is spread.

    Raises:
        ConfigError: for an unknown precision or a plugin that is none.

    Example::

        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
        model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, criterion, dataloader)
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ConfigError(f"plugin={plugin!r} is no Plugin: use one of colossalai.booster.plugin")
        self.plugin, self.logger = plugin, get_dist_logger()
        if plugin is not None and plugin.control_device() and device is not None:
            self.logger.warning(f"device={device!r} is dropped: {type(plugin).__name__} moves the model itself", ranks=[0])
        if plugin is not None and plugin.control_precision() and mixed_precision is not None:
            self.logger.warning(
                f"mixed_precision={mixed_precision!r} is dropped: give precision to {type(plugin).__name__}", ranks=[0]
            )
            mixed_precision = None
        self.accelerator = Accelerator(device) if device is not None and not (plugin and plugin.control_device()) else None
        self.mixed_precision = self._precision(mixed_precision)
        own_io = plugin is not None and plugin.control_checkpoint_io()
        self.checkpoint_io = plugin.get_checkpoint_io() if own_io else GeneralCheckpointIO()

    @staticmethod
    def _precision(mixed_precision) -> MixedPrecision | None:
        if isinstance(mixed_precision, str):
            return mixed_precision_factory(mixed_precision)
        if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
            raise ConfigError(f'mixed_precision={mixed_precision!r}: use a name such as "bf16", or a MixedPrecision')
        return mixed_precision

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable | None, DataLoader | None, LRScheduler | None]:
        """Wrap everything for distributed training; always returns the five, in this order, None where None was given.

        The optimizer given goes on working inside the returned wrapper, so schedulers built on it stay valid.

        Raises:
            DisagreementError: where the ranks' plugins, models or optimizers differ, or a rank does not come.
        """
        pretrained = get_pretrained_path(model)
        if self.plugin is not None:
            comm.agree("Booster.boost", {**self.plugin.agreement(), **describe(model, optimizer)})
            model, optimizer, criterion, dataloader, lr_scheduler = self.plugin.configure(
                model, optimizer, criterion, dataloader, lr_scheduler
            )
        elif optimizer is not None and not isinstance(optimizer, OptimizerWrapper) and self.mixed_precision is None:
            optimizer = OptimizerWrapper(optimizer)
        if self.accelerator is not None:
            model = self.accelerator.configure_model(model)
        if self.mixed_precision is not None:
            model, optimizer, criterion = self.mixed_precision.configure(model, optimizer, criterion)
        if pretrained is not None:
            self.load_model(model, pretrained)
            set_pretrained_path(model.unwrap() if isinstance(model, ModelWrapper) else model, None)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Gradients of ``loss``, a scalar."""
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward, and with an optimizer backward, of the next batch through all pipeline stages.

        Returns ``{"loss": ..., "outputs": ...}``, filled on the last stage.
        """
        if not isinstance(self.plugin, PipelinePluginBase):
            raise ConfigError(
                f"execute_pipeline: {type(self.plugin).__name__} has no pipeline; use HybridParallelPlugin(pp_size > 1)"
            )
        return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    def no_sync(self, model: nn.Module | None = None, optimizer: OptimizerWrapper | None = None) -> AbstractContextManager:
        """Backward calls inside only add to each rank's own gradients; the next one outside reduces the sum."""
        if self.plugin is None:
            raise ConfigError("no_sync: without a plugin nothing is synchronised")
        if not self.plugin.support_no_sync():
            raise ConfigError(f"no_sync: {type(self.plugin).__name__} does not support it; call backward repeatedly instead")
        return self.plugin.no_sync(model, optimizer)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Freeze ``model`` and add trainable low-rank adapters; before boost.

        Args:
            pretrained_dir: adapters to continue from.
            lora_config: ``peft.LoraConfig`` of new ones.
            bnb_quantization_config, quantize: quantised frozen weights, which come in a later release.
        """
        if self.plugin is None or not self.plugin.support_lora():
            raise ConfigError(
                f"enable_lora: {type(self.plugin).__name__} does not support LoRA; use TorchDDPPlugin or LowLevelZeroPlugin"
            )
        if pretrained_dir is None and lora_config is None:
            raise ConfigError("enable_lora: give lora_config for new adapters or pretrained_dir for saved ones")
        if lora_config is not None and not hasattr(lora_config, "peft_type"):
            raise ConfigError(f"lora_config={lora_config!r}: use peft.LoraConfig")
        refuse_pending_arguments("Booster.enable_lora", quantize=quantize, bnb_quantization_config=bnb_quantization_config)
        return self.plugin.enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)

    # -- checkpoints: collective, every rank calls them ----------------------------------------------------------------

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load weights from a file or a Hugging Face directory into a boosted model."""
        self.checkpoint_io.load_model(model, checkpoint, strict, low_cpu_mem_mode, num_threads)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save the whole model: one file, or with ``shard`` a Hugging Face directory of files of ``size_per_shard`` MiB."""
        self.checkpoint_io.save_model(model, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_safetensors, use_async)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str, low_cpu_mem_mode: bool = True, num_threads: int = 1) -> None:
        """Load optimizer state, learning rates and loss scale into a boosted optimizer."""
        self.checkpoint_io.load_optimizer(optimizer, checkpoint, low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save the whole optimizer: one file, or with ``shard`` a directory."""
        self.checkpoint_io.save_optimizer(optimizer, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_async)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str, use_safetensors: bool = False) -> None:
        """Save only the adapters, as peft does."""
        if self.plugin is None or not self.plugin.support_lora():
            raise ConfigError(f"save_lora_as_pretrained: {type(self.plugin).__name__} does not support LoRA")
        self.checkpoint_io.save_lora_as_pretrained(model, checkpoint, use_safetensors)

    def save_training_state(self, checkpoint: str, dataloader: Any = None, extra: dict | None = None) -> None:
        """Save what else a bitwise resume needs: every rank's random generators, the dataloader's place, and ``extra``."""
        self.checkpoint_io.save_training_state(checkpoint, dataloader, extra)

    def load_training_state(self, checkpoint: str, dataloader: Any = None) -> dict:
        """Restore what :meth:`save_training_state` saved; returns ``extra``."""
        return self.checkpoint_io.load_training_state(checkpoint, dataloader)


def describe(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What must be alike on all ranks before parameters are packed: shapes, dtypes, groups."""
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    groups = [] if optimizer is None else optimizer.param_groups
    plain = (bool, int, float, str, tuple)
    names = dict.fromkeys(key for group in groups for key, value in group.items() if isinstance(value, plain))
    return {
        "model": shapes,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "param_groups": [len(group["params"]) for group in groups],
        **{f"the optimizer's {name}": [group.get(name) for group in groups] for name in names},
    }
