"""ZeRO stage 1 and 2."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from colossalai import comm
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import AMPModelMixin, ModelWrapper, OptimizerWrapper
from colossalai.interface.token_weight import check_loss_reduction
from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments
from colossalai.zero.low_level import LowLevelZeroOptimizer

from ._common import (
    add_adapters_to_optimizer,
    move_to_device,
    require_distributed,
    sync_from_first_rank,
    weigh_by_tokens,
)
from .dp_plugin_base import DPPluginBase

LowLevelZeroCheckpointIO = CheckpointIO  # upstream's name of it: the one reader and writer serves every plugin

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class LowLevelZeroModel(ModelWrapper, AMPModelMixin):
    """The module in the working precision, on this rank's device.

    Parameters are cast in place, so an optimizer built before stays valid. Buffers keep their dtype (rotary tables, counters),
    except the running statistics of normalisations, which follow the weights.

    Args:
        precision: "fp16", "bf16" or "fp32".
        overlap_allgather: let each module wait, in its forward, for the parameters it uses.
        cast_inputs: cast floating inputs of forward to the working dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: str,
        overlap_allgather: bool = False,
        cast_inputs: bool = True,
        use_fp8: bool = False,
    ) -> None:
        super().__init__(module)
        refuse_pending_arguments("LowLevelZeroModel", use_fp8=use_fp8)
        self.dtype = DTYPES[precision]
        self.cast_inputs = cast_inputs and self.dtype != torch.float32
        self.overlap_allgather = overlap_allgather
        self._optimizers: list[LowLevelZeroOptimizer] = []
        for param in module.parameters():
            if param.is_floating_point():
                param.data = param.data.to(self.dtype)
        for norm in module.modules():
            if getattr(norm, "track_running_stats", False):
                for buffer in norm.buffers(recurse=False):
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(self.dtype)
        move_to_device(module)

    def forward(self, *args, **kwargs):
        if self.cast_inputs:
            args, kwargs = tree_map(self._cast, args), tree_map(self._cast, kwargs)
        return super().forward(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def attach(self, optimizer: LowLevelZeroOptimizer) -> None:
        """Note an optimizer whose masters follow these weights; there may be several."""
        self._optimizers.append(optimizer)
        self.module.register_state_dict_pre_hook(lambda *args: optimizer._force_wait_all_gather())
        if self.overlap_allgather:
            ParameterGate(self.module, optimizer)

    def __deepcopy__(self, memo: dict) -> "LowLevelZeroModel":
        """A model of its own (for an average of weights, say), which no optimizer works on."""
        self._force_wait_all_gather()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "_optimizers": []}, memo))
        return twin

    def update_master_params(self) -> None:
        for optimizer in self._optimizers:
            optimizer.update_master_params()

    def _force_wait_all_gather(self) -> None:
        for optimizer in self._optimizers:
            optimizer._force_wait_all_gather()


class ParameterGate:
    """Holds each module's forward until the parameters it uses have been gathered (``overlap_allgather``).

    Modules wait for their own parameters. A parameter may be used without its module's forward being called (``F.linear`` on
    another module's weight), so the first forward waits for everything and notes whose forward runs; the buckets of the others
    are waited for before anything else in every later one. It hangs on ``module`` itself, not on its wrapper: ``generate`` and
    the like call the inner model.
    """

    def __init__(self, module: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._buckets = {}
        self._ran: set[nn.Module] = set()
        self._up_front: list | None = None
        # Plain functions, not bound methods: a deep copy of the module must not copy the optimizer along.
        module.register_forward_pre_hook(lambda root, args: self._enter())
        for owner in module.modules():
            buckets = optimizer.buckets_of(owner.parameters(recurse=False))
            if buckets:
                self._buckets[owner] = buckets
                owner.register_forward_pre_hook(lambda owner, args: self._before(owner))

    def _enter(self) -> None:
        """A forward of the whole model starts."""
        if self._up_front is None and self._ran:
            self._up_front = [b for owner, some in self._buckets.items() if owner not in self._ran for b in some]
        self._wait_up_front()

    def _wait_up_front(self) -> None:
        if self._up_front is None:
            self._optimizer._force_wait_all_gather()
        else:
            self._optimizer.wait_for(self._up_front)

    def _before(self, owner: nn.Module) -> None:
        if owner in self._buckets:  # not so in a deep copy, whose parameters are its own
            self._ran.add(owner)
            self._wait_up_front()
            self._optimizer.wait_for(self._buckets[owner])


class LowLevelZeroPlugin(DPPluginBase):
    """Optimizer states (stage 1), and gradients (stage 2), sharded over the ranks.

    Args:
        stage: 1 or 2.
        precision: "fp16", "bf16" or "fp32": the dtype of the model; masters are fp32.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: loss scaling, fp16 only.
        max_norm: clip gradients to this norm; 0 for not.
        norm_type: 2.
        reduce_bucket_size_in_m: at most so many times 2**20 elements are reduced together.
        communication_dtype: dtype gradients are sent in; None for their own.
        overlap_communication: reduce while backward runs.
        overlap_allgather: gather updated parameters while the next forward runs.
        cpu_offload: masters and optimizer state in host memory.
        master_weights: keep fp32 masters under 16-bit precision.
        verbose: log how parameters were packed.
        cast_inputs: cast floating inputs of forward to the working dtype.
        extra_dp_size: replicas of the shard group: states are sharded over world / extra_dp_size ranks.
        loss_reduction: "mean" of the losses, or "token": weighed by their labels; see :mod:`colossalai.interface.token_weight`.

    Raises:
        ConfigError: for a value outside the above.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        *,
        loss_reduction: str = "mean",
    ) -> None:
        self.arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__", "verbose")}
        require_distributed("LowLevelZeroPlugin")
        super().__init__()
        refuse_pending_arguments("LowLevelZeroPlugin", fp8_communication=fp8_communication, use_fp8=use_fp8)
        check_loss_reduction(loss_reduction)
        if stage not in (1, 2):
            raise ConfigError(f"stage={stage}: LowLevelZeroPlugin has stages 1 and 2; stage 3 is GeminiPlugin")
        if precision not in DTYPES:
            raise ConfigError(f"precision={precision!r}: use one of {list(DTYPES)}")
        if norm_type != 2.0:
            raise ConfigError(f"norm_type={norm_type}: gradients are clipped by their L2 norm, use norm_type=2.0")
        if extra_dp_size < 1 or self.world_size % extra_dp_size:
            raise ConfigError(f"extra_dp_size={extra_dp_size} does not divide the world size {self.world_size}")
        if reduce_bucket_size_in_m <= 0:
            raise ConfigError(f"reduce_bucket_size_in_m={reduce_bucket_size_in_m} must be positive")
        if max_norm < 0:
            raise ConfigError(f"max_norm={max_norm}: use a positive norm, or 0 for no clipping")
        if communication_dtype is not None and not getattr(communication_dtype, "is_floating_point", False):
            raise ConfigError(f"communication_dtype={communication_dtype!r}: use a floating torch dtype such as torch.float32")
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1 or hysteresis < 0:
            raise ConfigError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, growth_interval={growth_interval}, "
                f"hysteresis={hysteresis}: the loss scale needs growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1 "
                "and hysteresis >= 0"
            )
        if precision == "fp16" and not min_scale <= initial_scale <= max_scale:
            raise ConfigError(f"initial_scale={initial_scale} must lie between min_scale={min_scale} and max_scale={max_scale}")
        self.stage, self.precision, self.verbose = stage, precision, verbose
        self.overlap_allgather, self.cast_inputs, self.loss_reduction = overlap_allgather, cast_inputs, loss_reduction
        shard_group, extra_group = self._make_groups(extra_dp_size)
        self.zero_optim_kwargs = dict(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            clip_grad_norm=max_norm,
            reduce_bucket_size=max(1, int(reduce_bucket_size_in_m * 1024 * 1024)),
            communication_dtype=communication_dtype,
            overlap_communication=overlap_communication,
            partition_grad=(stage == 2),
            cpu_offload=cpu_offload,
            master_weights=master_weights,
            overlap_allgather=overlap_allgather,
            dp_process_group=shard_group,
            extra_dp_group=extra_group,
        )

    def _make_groups(self, extra: int) -> tuple:
        """(shard group, replica group): ranks as (extra, inner), None for the world and for no replicas."""
        if extra == 1:
            return None, None
        ranks = np.arange(self.world_size).reshape(extra, -1)
        mine = [comm.new_group(row.tolist()) for row in ranks], [comm.new_group(column.tolist()) for column in ranks.T]
        inner = ranks.shape[1]
        return mine[0][self.rank // inner], mine[1][self.rank % inner]

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

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
        if not isinstance(model, ModelWrapper):
            model = LowLevelZeroModel(model, self.precision, self.overlap_allgather, self.cast_inputs)
            if optimizer is None:
                sync_from_first_rank(model.module)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            in_optimizer = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            sync_from_first_rank(model.module, skip=in_optimizer)
            optimizer = LowLevelZeroOptimizer(optimizer, module=model.module, verbose=self.verbose, **self.zero_optim_kwargs)
            model.attach(optimizer)
            weigh_by_tokens(self.loss_reduction, model, optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> AbstractContextManager:
        if not isinstance(optimizer, LowLevelZeroOptimizer):
            raise ConfigError("no_sync: give the boosted optimizer, booster.no_sync(optimizer=optimizer)")
        return optimizer.no_sync()
