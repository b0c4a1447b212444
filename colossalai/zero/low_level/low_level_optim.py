"""ZeRO stage 1 and 2: optimizer states sharded over the data-parallel ranks, at stage 2 the gradients too.

A step, after one or more ``optimizer.backward(loss)``::

    reducer.finish()        what backward has not reduced yet                 1/N of the gradients on each rank
    norm, overflow          one all-reduce of one number
    optim.step()            the user's optimizer, on this rank's segments of the fp32 masters
    bucket.publish()        masters into the parameters of all ranks         all-gather in place

Communication per step: 2P elements at stage 1, (k + 1)P at stage 2 with k backward calls, P being the parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.amp.naive_amp.watch import NonFiniteWatch
from colossalai.interface import OptimizerWrapper
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError, GradientOverflowError, LayoutError
from colossalai.utils.pending import refuse_pending_arguments

from ..bucket import FlatBucket, Slot, balanced_owners, make_buckets
from ..optimizer_kind import OptimizerKind, optimizer_kind
from ..reducer import GradReducer
from ..repoint import SegmentNorms, repoint
from .gradients import ZeroGradientsMixin
from .state import ZeroStateMixin


class LowLevelZeroOptimizer(ZeroGradientsMixin, ZeroStateMixin, OptimizerWrapper):
    """The user's optimizer, stepping each rank's segments of the parameters.

    Args:
        optimizer: any torch optimizer built on the model's parameters, except closure-driven and sparse ones. It stays the
            object that works: its groups then hold this rank's segments.
        pg_to_param_list: process group (or tuple: shard group, replica group) -> its parameters, where not all share one.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: loss scaling, fp16 only.
        clip_grad_norm: largest norm of all gradients; 0 for no clipping.
        verbose: log how the parameters were packed.
        reduce_bucket_size: elements that are reduced together at most.
        communication_dtype: dtype gradients are sent in; None for the one they were accumulated in.
        overlap_communication: reduce while backward still runs.
        partition_grad: stage 2.
        cpu_offload: keep masters and optimizer state on the CPU.
        dp_process_group, extra_dp_group: shard within the first, average over both.
        forced_dtype: cast the parameters to it first.
        master_weights: step fp32 masters of 16-bit parameters; else the 16-bit slices themselves.
        overlap_allgather: let the next forward wait for each bucket instead of the step for all.
        backward_context: a context manager factory entered around each backward.
        module: the model, for parameter names in errors and checkpoints, and to notice replaced parameters.

    Raises:
        ConfigError: for an optimizer that cannot be sharded or arguments that exclude each other.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pg_to_param_list: dict | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group=None,
        extra_dp_group=None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context=None,
        *,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__(optimizer)
        refuse_pending_arguments("LowLevelZeroOptimizer", fp8_communication=fp8_communication)
        if pg_to_param_list is not None and dp_process_group is not None:
            raise ConfigError("pg_to_param_list and dp_process_group exclude each other: give the groups in one of them")
        if extra_dp_group is not None and dp_process_group is None:
            raise ConfigError("extra_dp_group needs dp_process_group, the group to shard over")
        self.stage = 2 if partition_grad else 1
        self.module, self.clip_grad_norm, self.backward_context = module, clip_grad_norm, backward_context
        self.cpu_offload, self.master_weights, self.overlap_allgather = cpu_offload, master_weights, overlap_allgather
        self.require_grad_sync = True
        self._kind = optimizer_kind(optimizer)
        self._remember_groups(forced_dtype)
        groups = pg_to_param_list or {(dp_process_group, extra_dp_group): [slot.param for slot in self._slots.values()]}
        if len({_pair(key)[0] for key in groups}) < len(groups):
            raise ConfigError("pg_to_param_list: a shard group comes twice; join its parameters in one entry")
        self._reducers = [
            GradReducer(
                self._make_buckets(params, shard_group, reduce_bucket_size),
                self.stage,
                overlap_communication,
                communication_dtype,
                extra_group,
            )
            for (shard_group, extra_group), params in ((_pair(key), params) for key, params in groups.items())
            if any(param in self._slots for param in params)
        ]
        self._check_covered()
        self._norm_group = self._widest_group()
        self._buckets = [bucket for reducer in self._reducers for bucket in reducer.buckets]
        self.shard_group = self._reducers[0].group
        self._make_masters()
        self.grad_scaler = self._make_scaler(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        )
        self._gathering: dict[FlatBucket, comm.Work] = {}
        self._norm: Tensor | None = None
        self._watch = NonFiniteWatch()
        if verbose:
            self._describe()

    # -- construction ------------------------------------------------------------------------------------------------

    def _remember_groups(self, forced_dtype: torch.dtype | None) -> None:
        """Number the parameters as the original optimizer has them, and make a slot for each trainable one."""
        names = {} if self.module is None else {p: name for name, p in self.module.named_parameters()}
        self._original: list[list[nn.Parameter]] = [list(group["params"]) for group in self.optim.param_groups]
        self._slots: dict[nn.Parameter, Slot] = {}
        self._frozen: list[tuple[str, nn.Parameter]] = []
        index = 0
        for number, params in enumerate(self._original):
            for position, param in enumerate(params):
                name = names.get(param, f"parameter {position} of group {number}")
                if not param.requires_grad:
                    self._frozen.append((name, param))
                elif forced_dtype is not None:
                    param.data = param.data.to(forced_dtype)
                if param.requires_grad:
                    self._slots[param] = Slot(param, index, name)
                index += 1
        kinds = {slot.param.dtype for slot in self._slots.values() if not getattr(slot.param, "skip_zero_check", False)}
        if len(kinds) > 1:
            raise ConfigError(f"parameters of several dtypes {sorted(map(str, kinds))}: cast the model, or give forced_dtype")
        if not self._slots:
            raise ConfigError("optimizer: none of its parameters requires a gradient, so there is nothing to train")
        self.dtype = next(iter(kinds), next(iter(self._slots)).dtype)

    def _make_buckets(self, params: list[nn.Parameter], group, bucket_elements: int) -> list[FlatBucket]:
        slots = [self._slots[param] for param in params if param in self._slots]
        twice = [slot.name for slot in slots if slot.bucket is not None]
        if twice or len(set(params)) < len(params):
            raise ConfigError(f"pg_to_param_list: {twice[:5] or 'a parameter'} is listed twice, give it one process group")
        owners = balanced_owners(slots, comm.world_size(group)) if self._kind is OptimizerKind.WHOLE else None
        buckets = make_buckets(slots, group, bucket_elements, owners)
        for bucket in buckets:  # all ranks start from the weights of the first
            comm.broadcast(bucket.flat, src=0, group=group)
        return buckets

    def _check_covered(self) -> None:
        missing = [slot.name for slot in self._slots.values() if slot.bucket is None]
        if missing:
            raise ConfigError(f"pg_to_param_list names no process group for {missing[:5]}: list every trainable parameter")

    def _widest_group(self):
        """The ranks that hold pieces of any parameter: those the norm is taken over."""
        if len(self._reducers) > 1 and any(reducer.extra_group is not None for reducer in self._reducers):
            return None
        groups = [reducer.group for reducer in self._reducers]
        widest = max(groups, key=comm.world_size)
        for group in groups:
            if not set(comm.global_ranks(group)) <= set(comm.global_ranks(widest)):
                raise ConfigError(
                    f"pg_to_param_list: the groups of ranks {comm.global_ranks(group)} and {comm.global_ranks(widest)} overlap only "
                    "in part, so that no gradient norm is defined; let one group contain the others"
                )
        return widest

    def _make_masters(self) -> None:
        for bucket in self._buckets:
            low = bucket.dtype.itemsize < 4
            dtype = torch.float32 if self.master_weights and low else bucket.dtype
            bucket.make_master(dtype, torch.device("cpu") if self.cpu_offload else bucket.device)
        repoint(self.optim, self._slots)
        if self._kind is OptimizerKind.SEGMENT_NORMS:
            self.optim.segment_norms = SegmentNorms([(r.group, r.slots) for r in self._reducers], self._norm_group)

    def _make_scaler(self, initial, growth, backoff, interval, low, high, hysteresis) -> DynamicGradScaler | None:
        if self.dtype != torch.float16:
            return None
        return DynamicGradScaler(initial, growth, backoff, interval, low, high, hysteresis)

    def _describe(self) -> None:
        elements, padding = sum(b.bounds[-1] for b in self._buckets), sum(b.padding for b in self._buckets)
        get_dist_logger().info(
            f"ZeRO-{self.stage}: {len(self._slots)} parameters in {len(self._buckets)} buckets, {elements} elements of which "
            f"{padding} padding, optimizer {type(self.optim).__name__} on {self._kind.value}",
            ranks=[0],
        )

    # -- gradients ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward calls inside only add to this rank's gradients; the next one outside, or the step, reduces the sum."""
        before, self.require_grad_sync = self.require_grad_sync, False
        try:
            yield
        finally:
            self.require_grad_sync = before

    @contextmanager
    def _one_backward(self) -> Iterator[None]:
        for reducer in self._reducers:
            reducer.begin(sync=self.require_grad_sync)
        if self.backward_context is None:
            yield
        else:
            with self.backward_context():
                yield
        for reducer in self._reducers:
            reducer.flush()

    def backward(self, loss: Tensor, inputs=None, retain_graph: bool = False, **kwargs) -> None:
        """Gradients of ``loss``, added to this window's; ``param.grad`` stays None, see :meth:`get_param_grad`."""
        with self._one_backward():
            super().backward(self._scaled(loss), inputs, retain_graph, **kwargs)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs=None, retain_graph: bool = False) -> None:
        """As :meth:`backward`, from the gradient of ``tensor``; under fp16 ``grad`` carries the loss scale already."""
        with self._one_backward():
            super().backward_by_grad(tensor, grad, inputs, retain_graph)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.grad_scaler is None else loss.float() * self.grad_scaler.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the current loss scale (1 unless fp16)."""
        return self._scaled(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget this window's gradients."""
        for reducer in self._reducers:
            reducer.reset(stepped=False)
        super().zero_grad(set_to_none=True)

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, closure=None) -> None:
        """Update the parameters of all ranks; collective. Inside ``no_sync`` it does nothing, as upstream's."""
        if closure is not None:
            raise ConfigError("step(closure=...): ZeRO cannot run a closure, call backward and then step()")
        if not self.require_grad_sync:
            get_dist_logger().warning("step() inside no_sync does nothing: call it after the with block", ranks=[0])
            return
        self._check_identity()
        self._watch.check()
        self._refuse_unseen_gradients()
        # Whether loss.backward() brought gradients is not known from this rank alone.
        if not any(reducer.calls for reducer in self._reducers):
            if not any([reducer.anything() for reducer in self._reducers]):
                return
        if self.grad_scaler is not None and any(reducer.foreign for reducer in self._reducers):
            raise ConfigError("loss.backward() under fp16 leaves the loss unscaled: call booster.backward(loss, optimizer)")
        self._finish_gradients()
        if self._overflowed():
            self.zero_grad()
            return
        self._hand_over()
        self.optim.step()
        for slot in self._slots.values():
            if slot.segment is not None:
                slot.segment.grad = None
        for reducer in self._reducers:
            reducer.reset(stepped=True)
        self._publish()

    def _refuse_unseen_gradients(self) -> None:
        unseen = [slot.name for slot in self._slots.values() if slot.param.grad is not None]
        if unseen:
            raise ConfigError(
                f"the .grad of parameters {unseen[:5]} was set by hand, which the step would overlook: use set_param_grad"
            )

    def _finish_gradients(self) -> None:
        """Reduce what is left, then the norm: afterwards each bucket's ``reduced`` is final but for one factor."""
        self._used = {}
        for reducer in self._reducers:
            self._used.update(zip((slot.index for slot in reducer.slots), reducer.finish()))
        self._factor = self._unscale_factor()
        if self.token_weight is not None:
            self.token_weight.reset()
        self._norm = self._reduced_norm() * self._factor
        if self.grad_scaler is None:
            self._watch.push("the gradient norm", self._norm)
        if self.clip_grad_norm > 0:
            self._factor *= (self.clip_grad_norm / (self._norm + 1e-6)).clamp(max=1.0)

    def _overflowed(self) -> bool:
        """fp16: whether any rank's gradients overflowed, all ranks alike since they share the norm; adapts the scale."""
        if self.grad_scaler is None:
            return False
        overflow = not comm.read_scalar(torch.isfinite(self._norm).float(), default=1.0, what="fp16 overflow")
        before = self.grad_scaler.value
        self.grad_scaler.update(overflow)
        if self.grad_scaler.stuck:
            raise GradientOverflowError(
                f"fp16 gradients overflowed in {self.grad_scaler.skipped_at_floor} steps in a row although the loss scale is at its "
                f"lowest, min_scale={self.grad_scaler.min_scale}; here (rank {comm.rank()}) in {self._bad_parameters()}. Lower the "
                'learning rate, look for NaN in the data, or train in precision="bf16"'
            )
        if overflow:
            get_dist_logger().warning(
                f"step {self.grad_scaler.steps} skipped: fp16 gradients overflowed at loss scale {before:g}, it is "
                f"{self.grad_scaler.value:g} now ({self.grad_scaler.skipped_steps} skipped so far)",
                ranks=[0],
            )
        return overflow

    def _bad_parameters(self) -> str:
        bad = [
            slot.name
            for bucket in self._buckets
            for slot in bucket.slots
            if slot.segment is not None and not bool(torch.isfinite(bucket.segment_of(slot, bucket.reduced)).all())
        ]
        return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "") if bad else "no parameter of this rank"

    def _hand_over(self) -> None:
        """Make the reduced gradients the segments' ``grad``; what no rank has a gradient of gets None, as in one process."""
        unchanged = self.grad_scaler is None and self.clip_grad_norm <= 0 and self.token_weight is None
        for bucket in self._buckets:
            if bucket.reduced is None:
                continue
            if not unchanged:
                bucket.reduced.mul_(self._factor.to(bucket.reduced.device))
            reduced = bucket.reduced.to(device=bucket.master.device, dtype=bucket.master.dtype)
            for slot in bucket.slots:
                if slot.segment is not None:
                    slot.segment.grad = bucket.segment_of(slot, reduced) if self._used[slot.index] else None

    def _publish(self) -> None:
        """Start the all-gather of every bucket; wait for it here, or under overlap_allgather in the next forward."""
        self._force_wait_all_gather()
        self._gathering = {id(bucket): bucket.publish(async_op=True) for bucket in self._buckets}
        if not self.overlap_allgather:
            self._force_wait_all_gather()

    def buckets_of(self, params) -> list[FlatBucket]:
        """The buckets that hold any of ``params``."""
        found = {id(slot.bucket): slot.bucket for slot in map(self._slots.get, params) if slot is not None}
        return list(found.values())

    def wait_for(self, buckets: list[FlatBucket]) -> None:
        """Wait until the parameters of ``buckets`` are the updated ones."""
        for bucket in buckets:
            work = self._gathering.pop(id(bucket), None)
            if work is not None:
                work.wait()

    def _force_wait_all_gather(self) -> None:
        self.wait_for(self._buckets)

    def _check_identity(self) -> None:
        for bucket in self._buckets:
            bucket.check_identity()
        for name, param in self._frozen:
            if param.requires_grad:
                raise LayoutError(f"parameter {name!r} was frozen at boost and requires a gradient now: unfreeze before boost")
        if self.module is not None:
            named = {slot.name: slot.param for slot in self._slots.values()}
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if named.get(name, param) is not param:
                    raise LayoutError(
                        f"parameter {name!r} was replaced after boost (load_state_dict(assign=True), resizing embeddings): its "
                        "updates would be lost. Change the model before boost, or load weights with booster.load_model"
                    )

    def add_param_group(self, param_group: dict) -> None:
        raise ConfigError("add_param_group after boost: add the group to the optimizer before boost")

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because fp16 gradients overflowed."""
        return 0 if self.grad_scaler is None else self.grad_scaler.skipped_steps

    @property
    def num_param_groups(self) -> int:
        return len(self._original)


def _pair(key: tuple | object) -> tuple:
    """(shard group, replica group) from a key of pg_to_param_list."""
    if not isinstance(key, tuple):
        return key, None
    return (key[0], key[1]) if len(key) == 2 else (key[0], None)
