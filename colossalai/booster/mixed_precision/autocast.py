"""fp16 and bf16 through torch's autocast: fp32 weights, 16-bit matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from colossalai.accelerator import get_accelerator
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.interface.model import AMPModelMixin
from colossalai.utils.errors import ConfigError

from .mixed_precision_base import MixedPrecision


class TorchAMPModule(ModelWrapper, AMPModelMixin):
    """Runs forward under autocast.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(module)
        self.dtype = dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(get_accelerator().name, dtype=self.dtype):
            return self.module(*args, **kwargs)


class TorchAMPOptimizer(OptimizerWrapper):
    """Scales losses by a ``GradScaler`` and skips steps whose gradients overflowed.

    Args:
        optim: the optimizer, wrapped by a plugin or not.
        init_scale, growth_factor, backoff_factor, growth_interval: ``torch.amp.GradScaler``'s.
    """

    def __init__(
        self,
        optim: Optimizer,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(optim)
        self.scaler = GradScaler(get_accelerator().name, init_scale, growth_factor, backoff_factor, growth_interval)
        self._unscaled = False

    def backward(self, loss: Tensor, inputs=None, retain_graph: bool = False, **kwargs) -> None:
        if self._unscaled:
            raise ConfigError(
                "backward after gradients were clipped or unscaled would add scaled gradients to unscaled ones: clip after the last "
                "backward of a window, then call step() or zero_grad()"
            )
        scaled = self.scale_loss(loss)
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward(scaled, inputs, retain_graph, **kwargs)
        else:
            super().backward(scaled, inputs, retain_graph, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale_grad(self) -> None:
        """Divide this window's gradients by the scale, once."""
        if not self._unscaled and self._has_gradients():
            self.scaler.unscale_(self._torch_optimizer())
            self._unscaled = True

    def _torch_optimizer(self) -> Optimizer:
        """What the scaler inspects and steps: the user's optimizer, whose groups all wrappers share."""
        return self.unwrap()

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    def step(self, *args, **kwargs) -> float | None:
        if not self._has_gradients():  # torch's scaler would raise where its optimizers do nothing
            return None
        self.unscale_grad()
        self._finish_inner_window()
        result = self.scaler.step(self._torch_optimizer(), *args, **kwargs)
        self.scaler.update()
        self._unscaled = False
        return result

    def _finish_inner_window(self) -> None:
        if isinstance(self.optim, OptimizerWrapper):
            self.optim._finish_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._unscaled:  # clipped, then thrown away: the scaler learns from the window all the same
            self.scaler.update()
            self._unscaled = False
        self.optim.zero_grad(set_to_none=set_to_none)

    def clip_grad_by_value(self, clip_value: float, *args, **kwargs) -> None:
        self.unscale_grad()
        self._finish_inner_window()
        super().clip_grad_by_value(clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | int = 2.0, error_if_nonfinite: bool = False, *args, **kwargs
    ) -> Tensor:
        self.unscale_grad()
        self._finish_inner_window()
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite, *args, **kwargs)

    def get_param_grad(self, param: Tensor) -> Tensor | None:
        grad = self.optim.get_param_grad(param) if isinstance(self.optim, OptimizerWrapper) else super().get_param_grad(param)
        if grad is not None and not self._unscaled:
            grad.div_(self.scaler.get_scale())
        return grad

    def scaler_state(self) -> dict:
        """The loss scale and its counters, for checkpoints."""
        return self.scaler.state_dict()

    def load_scaler_state(self, state: dict | None) -> None:
        if state:
            self.scaler.load_state_dict(state)


class FP16TorchMixedPrecision(MixedPrecision):
    """fp16 autocast with loss scaling.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: ``torch.amp.GradScaler``'s.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scaler_options = dict(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Callable | None = None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable | None]:
        model = TorchAMPModule(model, torch.float16)
        if optimizer is not None:
            optimizer = TorchAMPOptimizer(optimizer, **self.scaler_options)
        return model, optimizer, under_autocast(criterion, torch.float16)


class BF16MixedPrecision(MixedPrecision):
    """bf16 autocast; its range needs no loss scaling."""

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Callable | None = None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable | None]:
        model = TorchAMPModule(model, torch.bfloat16)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
        return model, optimizer, under_autocast(criterion, torch.bfloat16)


def under_autocast(criterion: Callable | None, dtype: torch.dtype) -> Callable | None:
    """``criterion`` under autocast: a module stays one."""
    if criterion is None:
        return None
    if isinstance(criterion, nn.Module):
        return TorchAMPModule(criterion, dtype)

    def wrapped(*args, **kwargs):
        with torch.autocast(get_accelerator().name, dtype=dtype):
            return criterion(*args, **kwargs)

    return wrapped
