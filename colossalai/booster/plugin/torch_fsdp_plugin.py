"""torch's FSDP2 (``fully_shard``) behind the Booster, with the keyword names of its predecessor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossalai import comm
from colossalai.accelerator import get_accelerator
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.interface.token_weight import check_loss_reduction
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments
from colossalai.zero.optimizer_kind import check_runs_on

from ._common import move_to_device, require_distributed, sync_from_first_rank, weigh_by_tokens
from .dp_plugin_base import DPPluginBase

TorchFSDPCheckpointIO = CheckpointIO  # upstream's name of it: the one reader and writer serves every plugin

# FSDP1's strategy by name -> does forward free the gathered parameters again?
RESHARD_AFTER_FORWARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class TorchFSDPModel(ModelWrapper):
    """A module whose parameters ``fully_shard`` turned into sharded DTensors.

    Args:
        module: sharded in place; its Parameter objects are replaced.
        blocks: submodules that are gathered and freed on their own; the rest goes with the root.
        cast_root_inputs: cast floating inputs of the module itself, whatever the policy says of its blocks.
        kwargs: ``fully_shard``'s.
    """

    def __init__(self, module: nn.Module, blocks: list[nn.Module] = (), cast_root_inputs: bool = False, **kwargs) -> None:
        super().__init__(module)
        for block in blocks:
            fully_shard(block, **kwargs)
        if cast_root_inputs:
            kwargs["mp_policy"] = replace(kwargs["mp_policy"], cast_forward_inputs=True)
        fully_shard(module, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to this rank's (whole) gradients."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


class FSDPOptimizerWrapper(OptimizerWrapper):
    """The user's optimizer over sharded parameters."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer)
        self.model = model

    def unwrap_model(self) -> nn.Module:
        """The user's module."""
        return self.model.unwrap() if isinstance(self.model, ModelWrapper) else self.model

    def get_param_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        grad = super().get_param_grad(param)
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    def clip_grad_by_norm(self, max_norm, norm_type=2.0, error_if_nonfinite=False, *args, **kwargs) -> torch.Tensor:
        norm = super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class TorchFSDPPlugin(DPPluginBase):
    """Parameters, gradients and optimizer states sharded by torch's FSDP2.

    Args:
        process_group: ranks to shard over; None for the world.
        sharding_strategy: FSDP1's ``FULL_SHARD`` (default) or ``SHARD_GRAD_OP``, as enum or by name.
        cpu_offload: True, or FSDP1's ``CPUOffload``: keep shards in host memory.
        auto_wrap_policy: which submodules are gathered on their own: FSDP1's policies, a set of classes, or None for the
            elements of every ``ModuleList``.
        backward_prefetch: ``BACKWARD_PRE`` or None, which is what FSDP2 does.
        mixed_precision: FSDP1's ``MixedPrecision`` or FSDP2's ``MixedPrecisionPolicy``.
        ignored_modules: modules whose parameters stay whole.
        sync_module_states: start from the first rank's weights.
        loss_reduction: "mean" of the losses, or "token": weighed by their labels; see :mod:`colossalai.interface.token_weight`.

    Raises:
        ConfigError: for what FSDP2 has no counterpart of, by argument name.
    """

    def __init__(
        self,
        process_group=None,
        sharding_strategy=None,
        cpu_offload=None,
        auto_wrap_policy=None,
        backward_prefetch=None,
        mixed_precision=None,
        ignored_modules=None,
        param_init_fn=None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
        *,
        loss_reduction: str = "mean",
    ) -> None:
        require_distributed("TorchFSDPPlugin")
        super().__init__()
        refuse_pending_arguments("TorchFSDPPlugin", fp8_communication=fp8_communication)
        check_loss_reduction(loss_reduction)
        if param_init_fn is not None:
            raise ConfigError("param_init_fn: FSDP2 shards initialised parameters; initialise the model before boost")
        prefetch = getattr(backward_prefetch, "name", backward_prefetch)
        if prefetch not in (None, "BACKWARD_PRE"):
            raise ConfigError(f"backward_prefetch={prefetch}: FSDP2 prefetches before (BACKWARD_PRE) and knows nothing else")
        strategy = getattr(sharding_strategy, "name", sharding_strategy) or "FULL_SHARD"
        if strategy not in RESHARD_AFTER_FORWARD:
            raise ConfigError(
                f"sharding_strategy={strategy}: use FULL_SHARD or SHARD_GRAD_OP (for NO_SHARD TorchDDPPlugin, for HYBRID_SHARD "
                "LowLevelZeroPlugin(extra_dp_size=...))"
            )
        self.reshard_after_forward = RESHARD_AFTER_FORWARD[strategy]
        self.process_group, self.auto_wrap_policy = process_group, auto_wrap_policy
        self.ignored_modules, self.sync_module_states = list(ignored_modules or []), sync_module_states
        self.offload = bool(getattr(cpu_offload, "offload_params", cpu_offload))
        self.mixed_precision, self.buffer_dtype = precision_policy(mixed_precision)
        # FSDP1 casts the root's inputs by default; FSDP2's own policy says it all itself.
        self.cast_root_inputs = getattr(mixed_precision, "cast_root_forward_inputs", False)
        self.loss_reduction = loss_reduction
        if self.mixed_precision.param_dtype == torch.float16:
            get_dist_logger().warning(
                "mixed_precision: FSDP in fp16 scales no loss, small gradients vanish; prefer bf16", ranks=[0]
            )
        self.arguments = dict(
            sharding_strategy=strategy,
            cpu_offload=self.offload,
            mixed_precision=str(self.mixed_precision),
            sync_module_states=sync_module_states,
            loss_reduction=loss_reduction,
        )

    def supported_precisions(self) -> list[str]:
        return ["fp32", "fp16", "bf16"]

    def control_precision(self) -> bool:
        return True

    def support_lora(self) -> bool:
        return False

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        if not isinstance(model, ModelWrapper):
            names = {p: name for name, p in model.named_parameters()}
            check_parameters(model, self.ignored_modules, optimizer)
            model = self._shard(move_to_device(model))
            if optimizer is not None:
                self._check_optimizer(optimizer)
                repoint_to_shards(optimizer, names, model.module)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            check_is_of(optimizer, set(model.parameters()))
            optimizer = FSDPOptimizerWrapper(optimizer, model)
            weigh_by_tokens(self.loss_reduction, model, optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if comm.is_fake():
            return
        mesh = self._mesh()
        check_runs_on(
            optimizer,
            lambda t: distribute_tensor(t.to(mesh.device_type), mesh, [Shard(0)]),
            lambda t: t.full_tensor().cpu(),
        )

    def _mesh(self) -> DeviceMesh:
        world = torch.distributed.group.WORLD if self.process_group is None else self.process_group
        with comm.real_tensors():
            return DeviceMesh.from_group(world, "cpu" if comm.is_fake() else get_accelerator().name)

    def _shard(self, model: nn.Module) -> TorchFSDPModel:
        if self.sync_module_states:
            sync_from_first_rank(model, self.process_group)
        if self.buffer_dtype is not None:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.buffer_dtype)
        ignored = {p for module in self.ignored_modules for p in module.parameters()}
        mesh = self._mesh()
        return TorchFSDPModel(
            model,
            blocks_to_wrap(model, self.auto_wrap_policy, self.ignored_modules),
            mesh=mesh,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=self.mixed_precision,
            cast_root_inputs=self.cast_root_inputs,
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if self.offload else OffloadPolicy(),
            ignored_params=ignored or None,
        )

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None):
        if not isinstance(model, TorchFSDPModel):
            raise ConfigError("no_sync: give the boosted model, booster.no_sync(model)")
        return model.no_sync()

    def enable_lora(self, model, pretrained_dir=None, lora_config=None, bnb_quantization_config=None) -> nn.Module:
        raise NotImplementedError("TorchFSDPPlugin has no LoRA yet: use LowLevelZeroPlugin or TorchDDPPlugin")


def precision_policy(mixed_precision) -> tuple[MixedPrecisionPolicy, torch.dtype | None]:
    """FSDP2's policy, and the dtype of buffers, for FSDP1's ``MixedPrecision`` (or FSDP2's own policy)."""
    if mixed_precision is None:
        return MixedPrecisionPolicy(), None
    if isinstance(mixed_precision, MixedPrecisionPolicy):
        return mixed_precision, None
    if getattr(mixed_precision, "keep_low_precision_grads", False):
        raise ConfigError("mixed_precision.keep_low_precision_grads: FSDP2 keeps gradients in the parameters' own dtype; leave it")
    policy = MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs,
    )
    return policy, mixed_precision.buffer_dtype


def check_is_of(optimizer: Optimizer, parameters: set[nn.Parameter]) -> None:
    """Raise where the optimizer holds parameters that the model does not (any more) have."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if p not in parameters]
    if unknown:
        raise ConfigError(
            f"optimizer: {len(unknown)} of its parameters are not the model's; build it on model.parameters(), and a second "
            "optimizer of a boosted model on those of the boosted one, since FSDP2 replaces them"
        )


def check_parameters(model: nn.Module, ignored_modules: list[nn.Module], optimizer: Optimizer | None = None) -> None:
    """Raise, by name, for parameters that FSDP2 cannot shard or whose hooks it would drop with the Parameter it replaces."""
    ignored = {p for module in ignored_modules for p in module.parameters()}
    trained = {p for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    for name, param in model.named_parameters():
        if param in ignored:
            if param in trained and param.requires_grad:
                raise ConfigError(
                    f"ignored_modules: parameter {name!r} is trained, but nobody averages its gradient over the ranks: freeze it, "
                    "or use LowLevelZeroPlugin"
                )
            continue
        if param.dim() == 0 or not param.is_contiguous():
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(param.shape)} and strides {param.stride()}: FSDP2 shards contiguous tensors "
                "of at least one dim; make it so, freeze it and list its module in ignored_modules, or use LowLevelZeroPlugin"
            )
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ConfigError(
                f"parameter {name!r} has a hook, which FSDP2 would lose: register it after boost, or use LowLevelZeroPlugin"
            )


def blocks_to_wrap(model: nn.Module, policy, ignored: list[nn.Module]) -> list[nn.Module]:
    """The submodules to shard on their own, inner ones first."""
    modules = [m for name, m in model.named_modules() if name and m not in ignored and any(True for _ in m.parameters())]
    if policy is None:
        stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        chosen = {element for stack in stacks for element in stack}
    elif hasattr(policy, "_run_policy"):  # FSDP1's policy objects
        chosen = set(policy._run_policy(model, set(ignored), {}))
    elif callable(policy):  # FSDP1's policy functions, one module at a time
        chosen = {m for m in modules if policy(module=m, recurse=False, nonwrapped_numel=sum(p.numel() for p in m.parameters()))}
    else:
        chosen = {m for m in modules if isinstance(m, tuple(policy))}
    return [m for m in reversed(modules) if m in chosen and not isinstance(m, nn.ModuleList)]


def repoint_to_shards(optimizer: Optimizer, names: dict[nn.Parameter, str], module: nn.Module) -> None:
    """Make the optimizer work on the sharded parameters: same groups, options and order; its state so far is sharded likewise."""
    check_is_of(optimizer, set(names))
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"][:] = [sharded[names[p]] for p in group["params"]]
    for old in [p for p in optimizer.state if p in names]:
        new, state = sharded[names[old]], optimizer.state.pop(old)
        optimizer.state[new] = {key: _shard_like(new, value) for key, value in state.items()}


def _shard_like(param: nn.Parameter, value: Any) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements)
