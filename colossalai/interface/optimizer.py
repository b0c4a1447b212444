"""What a plugin hands back instead of the user's optimizer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from colossalai.utils.errors import ConfigError

from .token_weight import TokenWeight


class OptimizerWrapper(Optimizer):
    """An optimizer around the user's optimizer, which stays the one that works.

    It is a ``torch.optim.Optimizer`` so that schedulers accept it, but owns no state: groups, state and defaults are the inner
    optimizer's, and so is every attribute it does not define itself.

    Args:
        optim: the user's optimizer.
    """

    token_weight: TokenWeight | None = None
    """Set by a plugin under ``loss_reduction="token"``."""

    def __init__(self, optim: Optimizer) -> None:  # no super().__init__(): it would make groups of its own
        self.optim = optim

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: unpickling or a failed constructor
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters the inner optimizer works on, flat."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict]:
        return self.optim.param_groups

    @property
    def defaults(self) -> dict:
        return self.optim.defaults

    @property
    def state(self) -> dict:
        return self.optim.state

    def add_param_group(self, param_group: dict) -> None:
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)
        if self.token_weight is not None:
            self.token_weight.reset()

    def backward(self, loss: Tensor, inputs=None, retain_graph: bool = False, **kwargs) -> None:
        """Gradients of ``loss``, a scalar; the other arguments are ``Tensor.backward``'s."""
        if self.token_weight is not None:
            loss = self.token_weight.weigh(loss)
        loss.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs=None, retain_graph: bool = False) -> None:
        """Gradients of ``tensor``, given the gradient ``grad`` that reaches it (same shape)."""
        if self.token_weight is not None:
            raise ConfigError(
                'backward_by_grad has no loss to weigh: under loss_reduction="token" use backward, or loss_reduction="mean"'
            )
        torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    _clipped_norm: Tensor | None = None

    def _finish_window(self) -> None:
        """Divide the gathered gradients by the window's mean number of labels, once, before they are used."""
        factor = self._window_factor()
        if factor is not None:
            self.token_weight.reset()
            for p in self.parameters:
                if p.grad is not None:
                    _scale(p.grad, factor)

    def _window_factor(self) -> Tensor | None:
        """What the gradients gathered so far still have to be multiplied by: (1,), or None for nothing. Collective."""
        weighs = self.token_weight is not None and self.token_weight.active
        return self.token_weight.factor() if weighs else None

    def step(self, *args, **kwargs):
        self._finish_window()
        return self.optim.step(*args, **kwargs)

    def state_dict(self) -> dict:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.optim.load_state_dict(state_dict)

    def clip_grad_by_value(self, clip_value: float, *args, **kwargs) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        self._finish_window()
        clip_grad_value_(self.parameters, clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args, **kwargs
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before."""
        self._finish_window()
        self._clipped_norm = clip_grad_norm_(self.parameters, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        return self._clipped_norm

    def get_param_grad(self, param: Tensor) -> Tensor | None:
        """The gradient of a model parameter so far: whole, unscaled, averaged over the ranks; None where there is none.

        The same call works under every plugin; where gradients are sharded it is collective: all ranks must call it.
        """
        factor = self._window_factor()
        if param.grad is None:
            return None
        grad = param.grad.detach().clone()
        if factor is not None:
            _scale(grad, factor)
        return grad

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs) -> float | None:
        """Norm of the gradients that were clipped last, before clipping; None before."""
        return None if self._clipped_norm is None else float(self._clipped_norm)

    def scale_loss(self, loss: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not scale losses: only mixed-precision optimizers do")

    def unscale_grad(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not scale losses: only mixed-precision optimizers do")

    def unwrap(self) -> Optimizer:
        """The user's optimizer."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim


def _scale(grad: Tensor, factor: Tensor) -> None:
    """Multiply in place by a one-element tensor, on the device; of a DTensor the local part."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    local.mul_(factor.to(local.dtype))


class DistributedOptim(Optimizer):
    """Base of optimizers that compute over whole tensors although each rank holds a part; see ``setup_distributed``."""

    def setup_distributed(
        self, tp_group=None, dp_group=None, shard_to_working_param=None, padding_map=None, is_zero: bool = False
    ) -> None:
        """Tell the optimizer which groups its tensors are cut over; called by plugins after wrapping."""
        raise NotImplementedError(f"{type(self).__name__} does not define setup_distributed")
