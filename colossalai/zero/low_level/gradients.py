"""Reading, editing and clipping the gradients of a window, which no ``param.grad`` holds under ZeRO."""

import torch
from torch import Tensor, nn

from colossalai import comm
from colossalai.nn.optimizer.segments import squared_norms
from colossalai.utils.errors import ConfigError

from ..bucket import FlatBucket, Slot
from ..reducer import GradReducer


class ZeroGradientsMixin:
    """The gradients of :class:`LowLevelZeroOptimizer` between backward and step. What reduces is collective."""

    def get_grad_norm(self, norm_type: float = 2, **kwargs) -> float | None:
        """L2 norm of the last step's gradients over all ranks: unscaled, before clipping; None before the first step."""
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: only 2 is computed")
        return None if self._norm is None else comm.read_scalar(self._norm, default=1.0)

    def get_param_grad(self, working_param: nn.Parameter) -> Tensor | None:
        """This window's gradient of a model parameter: whole, unscaled, averaged over the ranks, in fp32.

        Collective: every rank must ask for the same parameter. None where no rank has a gradient of it, and after the step.
        """
        slot = self._slots.get(working_param)
        if slot is None:
            return None
        reducer = self._reducer_of(slot)
        used = reducer.finish()
        if not used[reducer.slots.index(slot)]:
            return None
        bucket = slot.bucket
        full = bucket.reduced.new_zeros(bucket.bounds[-1])
        full[bucket.bounds[bucket.rank] : bucket.bounds[bucket.rank + 1]] = bucket.reduced
        comm.all_gather_into(full, bucket.bounds, group=bucket.group)
        return slot.view(full).clone().mul_(self._unscale_factor().to(full.dtype))

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[Tensor]:
        """This rank's flat part of the averaged gradient of the parameter with ``id(param) == param_id``, as a list of one.

        As in 0.5 it carries the loss scale. Empty where this rank's slice does not reach the parameter, or it has no gradient.
        Collective.
        """
        slot = next((slot for slot in self._slots.values() if id(slot.param) == param_id), None)
        if slot is None or not any(slot.param is p for p in self._original[group_id]):
            raise ConfigError(f"param_id={param_id} is the id() of no trainable parameter of group {group_id}")
        reducer = self._reducer_of(slot)
        used = reducer.finish()
        if slot.segment is None or not used[reducer.slots.index(slot)]:
            return []
        return [slot.bucket.segment_of(slot, slot.bucket.reduced).reshape(-1)]

    def get_working_grads_by_group_id(self, group_id: int) -> list[Tensor]:
        """:meth:`get_partitioned_gradients_by_param_id` of all trainable parameters of a group, in one list."""
        trainable = [p for p in self._original[group_id] if p in self._slots]
        return [piece for p in trainable for piece in self.get_partitioned_gradients_by_param_id(group_id, id(p))]

    def _reducer_of(self, slot: Slot) -> GradReducer:
        return next(reducer for reducer in self._reducers if slot.bucket in reducer.buckets)

    def set_param_grad(self, working_param: nn.Parameter, grad: Tensor) -> None:
        """Replace this window's gradient of a parameter by ``grad`` (the parameter's shape, unscaled, equal on all ranks)."""
        if self.get_param_grad(working_param) is None:
            raise ConfigError("set_param_grad: the parameter has no gradient in this window")
        slot, factor = self._slots[working_param], self._unscale_factor()
        self._reducer_of(slot).settle(slot.bucket)
        if slot.segment is not None:
            piece = slot.bucket.segment_of(slot, slot.bucket.reduced)
            piece.copy_(slot.layout.piece(grad, slot.bucket.rank).view_as(piece)).div_(factor)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args, **kwargs
    ) -> Tensor:
        """Scale this window's gradients so that their L2 norm over all ranks is at most ``max_norm``; returns the norm before.

        Collective. The plugin's ``max_norm`` does the same in ``step()`` without a pass of its own.
        """
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: ZeRO clips by the L2 norm, use norm_type=2.0")
        buckets = self._settled_buckets()
        norm = self._reduced_norm() * self._unscale_factor()
        if error_if_nonfinite and not comm.read_scalar(torch.isfinite(norm).float(), default=1.0):
            raise RuntimeError(f"clip_grad_by_norm: the norm of the gradients is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in buckets:
            bucket.reduced.mul_(factor.to(bucket.reduced.dtype))
        return norm.reshape(())

    def clip_grad_by_value(self, clip_value: float, *args, **kwargs) -> None:
        """Clamp every element of this window's gradients to ``[-clip_value, clip_value]``. Collective."""
        buckets = self._settled_buckets()
        limit = clip_value / self._unscale_factor()
        for bucket in buckets:
            limit = limit.to(bucket.reduced.dtype)
            bucket.reduced.clamp_(-limit, limit)

    def _settled_buckets(self) -> list[FlatBucket]:
        """The buckets with gradients, all reduced, their slices now being what later gradients are added to."""
        for reducer in self._reducers:
            reducer.finish()
            for bucket in reducer.buckets:
                if bucket.reduced is not None:
                    reducer.settle(bucket)
        return [bucket for bucket in self._buckets if bucket.reduced is not None]

    def _reduced_norm(self) -> Tensor:
        """(1,): L2 norm over all ranks of what is reduced so far, still to be multiplied by ``_unscale_factor``. Collective."""
        squares = torch.zeros(1, device=self._buckets[0].device, dtype=torch.promote_types(self.dtype, torch.float32))
        for reducer in self._reducers:
            reduced = [bucket.reduced for bucket in reducer.buckets if bucket.reduced is not None]
            if reduced:
                several = len(self._reducers) > 1 and reducer.extra_group is not None
                replicas = comm.world_size(reducer.extra_group) if several else 1
                squares += squared_norms(reduced).sum() / replicas
        comm.all_reduce(squares, group=self._norm_group)
        return squares.sqrt()

    def _unscale_factor(self) -> Tensor:
        """(1,): what reduced gradients are multiplied by to be those of the user's loss."""
        device = self._buckets[0].device
        factor = self._window_factor()
        factor = torch.ones(1, device=device) if factor is None else factor.to(device)
        return factor if self.grad_scaler is None else factor / self.grad_scaler.value
