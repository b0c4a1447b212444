"""What training in 16 bits adds to a step: the loss scale, and the decision to skip a step."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from colossalai import comm
from colossalai.accelerator import get_accelerator
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import GradientOverflowError

from .grad_scaler import DynamicGradScaler
from .watch import NonFiniteWatch


class MixedPrecisionMixin(ABC):
    """The part of a mixed-precision step that depends on the dtype. An optimizer owns one and calls, in this order::

        loss = mixin.pre_backward(loss)         backward
        if mixin.should_skip_step(): ...        step; one collective under fp16
        gradients / mixin.get_grad_div_scale()
        mixin.pre_zero_grad()                   zero_grad

    A plugin that shards gradients says in a subclass where an overflow is looked for.
    """

    dtype: torch.dtype

    @abstractmethod
    def pre_backward(self, loss: Tensor) -> Tensor:
        """What backward starts from instead of ``loss``."""

    @abstractmethod
    def pre_backward_by_grad(self, tensor: Tensor, grad: Tensor) -> Tensor:
        """What is passed on instead of ``grad``, a gradient that comes from elsewhere and carries the scale already."""

    @abstractmethod
    def should_skip_step(self) -> bool:
        """Whether this step must not be taken, the same on all ranks. To be asked once a step."""

    @abstractmethod
    def pre_zero_grad(self) -> None:
        """Called when the gradients are dropped."""

    @abstractmethod
    def get_grad_div_scale(self) -> float:
        """What gradients have to be divided by."""

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, as a number; no wait for the device."""
        return self.get_grad_div_scale()


class BF16MixedPrecisionMixin(MixedPrecisionMixin):
    """bf16 has float32's range: nothing is scaled, no step skipped. A loss that is not finite is warned about."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._watch = NonFiniteWatch()

    @property
    def nonfinite_losses(self) -> int:
        """Losses seen so far that were NaN or inf, on this rank; on CUDA some may be missed."""
        self._watch.check()
        return self._watch.count

    def pre_backward(self, loss: Tensor) -> Tensor:
        self._watch.push("the loss", loss)
        return loss

    def pre_backward_by_grad(self, tensor: Tensor, grad: Tensor) -> Tensor:
        return grad

    def should_skip_step(self) -> bool:
        return False

    def pre_zero_grad(self) -> None:
        pass

    def get_grad_div_scale(self) -> float:
        return 1.0


class FP16MixedPrecisionMixin(MixedPrecisionMixin):
    """fp16 with a dynamic loss scale, the same on all ranks; all of them skip a step that overflowed on one.

    The arguments are those of :class:`~colossalai.amp.naive_amp.grad_scaler.DynamicGradScaler`. A subclass says where
    to look for an overflow. Skipped steps are logged and counted in ``grad_scaler``.
    """

    dtype = torch.float16
    overflow_group = None
    """Ranks that decide together; None is the world."""

    def __init__(
        self,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
    ) -> None:
        self.grad_scaler = DynamicGradScaler(
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
        )

    @abstractmethod
    def check_local_overflow(self) -> bool | Tensor:
        """Whether a gradient on this rank is not finite; a one-element tensor is read after all ranks' are joined."""

    def overflow_sources(self) -> list[str]:
        """Names of this rank's parameters whose gradient is not finite. Asked only for an error's text."""
        return []

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far."""
        return self.grad_scaler.skipped_steps

    def pre_backward(self, loss: Tensor) -> Tensor:
        # In fp16 itself a loss of 1 would overflow at the default scale.
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return wide * self.grad_scaler.value

    def pre_backward_by_grad(self, tensor: Tensor, grad: Tensor) -> Tensor:
        return grad

    def should_skip_step(self) -> bool:
        """One all-reduce of one number, then its read: the only host synchronisation of a step.

        Raises:
            GradientOverflowError: on all ranks alike, after ``MAX_SKIPPED_AT_FLOOR`` overflows in a row at the lowest
                scale.
        """
        culprit = self._first_overflow()
        before = self.grad_scaler.value
        self.grad_scaler.update(culprit is not None)
        if culprit is None:
            return False
        if self.grad_scaler.stuck:
            raise GradientOverflowError(self._stuck_message(culprit))
        get_dist_logger().warning(
            f"step {self.grad_scaler.steps} skipped: fp16 gradients overflowed on rank {culprit} at loss scale "
            f"{before:g}, it is {self.grad_scaler.value:g} now ({self.grad_scaler.skipped_steps} skipped so far)",
            ranks=[0],
        )
        return True

    def _first_overflow(self) -> int | None:
        """The highest rank with an overflow, or None. Its name costs nothing: the flag is the rank plus one."""
        local = self.check_local_overflow()
        me = comm.rank(self.overflow_group) + 1
        if isinstance(local, Tensor):
            flag = local.detach().reshape(1).to(torch.float32) * me
        else:
            flag = torch.full((1,), float(me if local else 0), device=get_accelerator().get_current_device())
        comm.all_reduce(flag, group=self.overflow_group, op="max")
        found = int(comm.read_scalar(flag, default=0.0, what="fp16 overflow"))
        return found - 1 if found else None

    def _stuck_message(self, culprit: int) -> str:
        here = self.overflow_sources()
        names = ", ".join(here[:3]) + (f" and {len(here) - 3} more" if len(here) > 3 else "")
        where = f"here (rank {comm.rank(self.overflow_group)}) in {names}" if here else "in no parameter of this rank"
        return (
            f"fp16 gradients overflowed in {self.grad_scaler.skipped_at_floor} steps in a row although the loss scale "
            f"is at its lowest, min_scale={self.grad_scaler.min_scale}; last on rank {culprit}, {where}. Lower the "
            'learning rate, look for NaN in the data, or train in precision="bf16"'
        )

    def pre_zero_grad(self) -> None:
        pass

    def get_grad_div_scale(self) -> float:
        return self.grad_scaler.value
