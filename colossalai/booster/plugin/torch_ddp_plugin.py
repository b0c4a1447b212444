"""torch's DistributedDataParallel behind the Booster."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossalai import comm
from colossalai.accelerator import get_accelerator
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.interface.token_weight import check_loss_reduction
from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments
from colossalai.zero.data_parallel import DataParallelModel, DataParallelOptimizer

from ._common import (
    add_adapters_to_optimizer,
    move_state,
    move_to_device,
    require_distributed,
    sync_from_first_rank,
    weigh_by_tokens,
)
from .dp_plugin_base import DPPluginBase

TorchDDPCheckpointIO = CheckpointIO  # upstream's name of it: the one reader and writer serves every plugin


class TorchDDPModel(ModelWrapper):
    """The module in torch's DDP; arguments are DDP's. A module without trainable parameters is only made equal on all ranks."""

    def __init__(self, module: nn.Module, *args, **kwargs) -> None:
        super().__init__(module)
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        if self._names:
            self.module = DDP(module, *args, **kwargs)
        else:
            sync_from_first_rank(module)

    def unwrap(self, unwrap_peft: bool = True):
        inner = self.module.module if isinstance(self.module, DDP) else self.module
        return ModelWrapper(inner).unwrap(unwrap_peft)

    def forward(self, *args, **kwargs):
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            unused = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if unused is None:
                raise
            names = [self._names[int(i)] for i in unused.group(1).split()]
            raise RuntimeError(
                f"parameters {names} got no gradient in the last backward: pass find_unused_parameters=True to TorchDDPPlugin, "
                "or freeze them"
            ) from error

    def no_sync(self) -> AbstractContextManager:
        """Backward inside only adds to this rank's gradients."""
        if not isinstance(self.module, DDP):
            raise ConfigError("no_sync: the model has no trainable parameter")
        return self.module.no_sync()


class TorchDDPPlugin(DPPluginBase):
    """Every rank holds the whole model and averages gradients.

    Args:
        broadcast_buffers, bucket_cap_mb, find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph: as torch's.
        loss_reduction: "mean" of the losses, or "token": weighed by their labels; see :mod:`colossalai.interface.token_weight`.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
        *,
        loss_reduction: str = "mean",
    ) -> None:
        self.arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        require_distributed("TorchDDPPlugin")
        super().__init__()
        refuse_pending_arguments("TorchDDPPlugin", fp8_communication=fp8_communication)
        check_loss_reduction(loss_reduction)
        self.loss_reduction = loss_reduction
        self.bucket_bytes = int(bucket_cap_mb * 2**20)
        self.ddp_kwargs = dict(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        # Torch warns about these two whatever their value, so they go along only where they say something.
        self.ddp_kwargs |= {} if broadcast_buffers else {"broadcast_buffers": False}
        self.ddp_kwargs |= {"check_reduction": True} if check_reduction else {}

    def supported_precisions(self) -> list[str]:
        return ["fp32", "fp16", "bf16"]

    def control_precision(self) -> bool:
        return False

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        if self.lora_enabled and optimizer is not None:
            add_adapters_to_optimizer(model, optimizer)
        wrap = DataParallelOptimizer if comm.is_fake() else OptimizerWrapper
        if not isinstance(model, ModelWrapper):
            model = self._wrap(move_to_device(model))
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            move_state(optimizer)
            optimizer = wrap(optimizer, model) if comm.is_fake() else wrap(optimizer)
            weigh_by_tokens(self.loss_reduction, model, optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def _wrap(self, model: nn.Module) -> ModelWrapper:
        if comm.is_fake():  # torch's C++ reducer runs on no fake tensor: the stage-0 bucket does the same
            return DataParallelModel(model, self.bucket_bytes)
        if get_accelerator().name == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return TorchDDPModel(model, **self.ddp_kwargs)

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> AbstractContextManager:
        while isinstance(model, ModelWrapper) and not hasattr(model, "no_sync"):
            model = model.module
        if not hasattr(model, "no_sync"):
            raise ConfigError("no_sync: give the boosted model, booster.no_sync(model)")
        return model.no_sync()
