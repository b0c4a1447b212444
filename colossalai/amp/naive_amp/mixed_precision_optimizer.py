"""Training in 16 bits on one data-parallel rank or under DDP: working weights in 16 bits, masters in fp32."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer.flat import local
from colossalai.nn.optimizer.segments import own_norms, squared_norms
from colossalai.utils.errors import ConfigError

from .mixed_precision_mixin import BF16MixedPrecisionMixin, FP16MixedPrecisionMixin

MASTER = "master"
"""State key of a parameter's master: without it a resumed run would start from rounded weights."""


class NaiveFP16MixedPrecisionMixin(FP16MixedPrecisionMixin):
    """The loss scale of :class:`MixedPrecisionOptimizer`, which knows the gradients."""

    def __init__(self, optimizer: "MixedPrecisionOptimizer", **scaler: Any) -> None:
        super().__init__(**scaler)
        self._optimizer = optimizer

    def check_local_overflow(self) -> Tensor:
        return ~torch.isfinite(self._optimizer.local_square())

    def overflow_sources(self) -> list[str]:
        return [name for name, p in self._optimizer.named_working() if p.grad is not None and not bool(p.grad.isfinite().all())]


class MixedPrecisionOptimizer(OptimizerWrapper):
    """The user's optimizer, stepping fp32 masters of 16-bit parameters.

    The parameters in its groups are replaced in place: by an fp32 copy, by themselves where they are fp32, by nothing
    where they are frozen. What a scheduler or checkpoint refers to, the groups and their order, stays. State the
    optimizer has already (Adagrad's) moves to the masters.

    ``step`` hands the gradients over in fp32, divided by loss scale and clipping factor at once: a global norm above
    ``max_norm`` is brought down to it. Optimizers of :mod:`colossalai.nn.optimizer` take the 16-bit gradients as they
    are, so that no fp32 copy of them exists. Under fp16, if a gradient overflowed on any rank, all ranks skip the step
    (:class:`~.mixed_precision_mixin.FP16MixedPrecisionMixin`); ``grad_scaler.skipped_steps`` counts them.

    Args:
        optim: an optimizer built on the model's parameters; not closure-driven.
        precision: ``"fp16"`` or ``"bf16"``, the dtype of the model's weights.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: loss scaling,
            fp16 only.
        max_norm: largest norm of all gradients; 0 for no clipping.

    Raises:
        ValueError (ConfigError): for another precision.
        GradientOverflowError: in ``step``, where the loss scale cannot fall further and gradients overflow on and on.
    """

    def __init__(
        self,
        optim: Optimizer,
        precision: str = "fp16",
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
    ) -> None:
        super().__init__(optim)
        if precision not in ("fp16", "bf16"):
            raise ConfigError(f'precision={precision!r} must be "fp16" or "bf16"')
        if max_norm < 0:
            raise ConfigError(f"max_norm={max_norm!r} must not be negative; 0 is no clipping")
        self.max_norm = max_norm
        if precision == "fp16":
            self.mixed_precision = NaiveFP16MixedPrecisionMixin(
                self,
                initial_scale=initial_scale,
                min_scale=min_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                max_scale=max_scale,
            )
        else:
            self.mixed_precision = BF16MixedPrecisionMixin()
        self.working_to_master_map: dict[Tensor, Tensor] = {}
        self.master_to_working_map: dict[Tensor, Tensor] = {}
        self._names: dict[Tensor, str] = {}
        for number, group in enumerate(self.optim.param_groups):
            self._make_masters(number, group)
        self._takes_any = getattr(optim, "takes_any_grad_dtype", False)
        self._takes_scale = self._takes_any and "div_scale" in inspect.signature(type(optim).step).parameters
        self._norm: Tensor | None = None

    def _make_masters(self, number: int, group: dict) -> None:
        names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
        kept, kept_names = [], []
        for name, p in zip(names, group["params"], strict=True):
            if not p.requires_grad:
                continue
            master = p if p.dtype == torch.float32 else p.detach().float()
            self.working_to_master_map[p] = master
            self.master_to_working_map[master] = p
            self._names[p] = f"{name}, shape {tuple(p.shape)}"
            if master is not p and p in self.optim.state:
                self.optim.state[master] = {key: _widened(value, p) for key, value in self.optim.state.pop(p).items()}
            kept.append(master)
            kept_names.append(name)
        group["params"][:] = kept
        if "param_names" in group:
            group["param_names"][:] = kept_names

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of working parameters; they get masters too."""
        self.optim.add_param_group(param_group)
        self._make_masters(len(self.optim.param_groups) - 1, self.optim.param_groups[-1])

    @property
    def grad_scaler(self):
        """The loss scaler with its counts of steps and skipped steps; None under bf16."""
        return getattr(self.mixed_precision, "grad_scaler", None)

    def named_working(self) -> list[tuple[str, Tensor]]:
        """(name, working parameter); names say group and position unless the optimizer was built on named
        parameters."""
        return [(name, p) for p, name in self._names.items()]

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        """(working parameter, gradient) where there is one."""
        return [(p, p.grad) for p in self.working_to_master_map if p.grad is not None]

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, inputs=None, retain_graph: bool = False, **kwargs) -> None:
        """Gradients of ``loss``, a scalar, times the loss scale under fp16; the other arguments are
        ``Tensor.backward``'s."""
        super().backward(self.mixed_precision.pre_backward(loss), inputs, retain_graph, **kwargs)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs=None, retain_graph: bool = False) -> None:
        """Gradients of ``tensor``, given the gradient that reaches it; under fp16 it carries the loss scale already."""
        super().backward_by_grad(tensor, self.mixed_precision.pre_backward_by_grad(tensor, grad), inputs, retain_graph)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, in fp32; itself under bf16."""
        return self.mixed_precision.pre_backward(loss)

    def unscale_grad(self) -> None:
        raise ConfigError("16-bit gradients stay scaled, as they would vanish: read them with get_param_grad, step() unscales")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of working parameters and masters."""
        super().zero_grad(set_to_none)
        for p, grad in self._gradients():
            if set_to_none:
                p.grad = None
            else:
                grad.zero_()
        self.mixed_precision.pre_zero_grad()

    def _finish_window(self) -> None:
        factor = self._take_factor()
        if factor is not None:
            self._multiply(factor)

    def _take_factor(self) -> Tensor | None:
        """What ``loss_reduction="token"`` has the gradients multiplied by, once for this window; None for nothing."""
        factor = self._window_factor()
        if factor is not None:
            self.token_weight.reset()
        return factor

    def _multiply(self, factor: Tensor) -> None:
        for _, grad in self._gradients():
            local(grad).mul_(factor.to(grad.device))

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, closure=None) -> None:
        """Update masters and working parameters, or skip the step where fp16 gradients overflowed; drops the
        gradients."""
        if closure is not None:
            raise ConfigError("step(closure=...): mixed precision cannot run a closure, call backward and then step()")
        factor = self._take_factor()
        if self.mixed_precision.should_skip_step():
            self.zero_grad()
            return
        scale = self.mixed_precision.get_grad_div_scale()
        if factor is not None:
            scale = scale / factor.reshape(())
        pairs = self._gradients()
        self._norm = self._compute_grad_norm(pairs) / scale
        self._step_masters(pairs, self._divisor(scale))
        for master in self.master_to_working_map:
            master.grad = None
        self._publish()

    def _divisor(self, scale: float | Tensor) -> float | Tensor:
        """What the gradients are divided by: loss scale times how far they are above ``max_norm``; never read by the
        host."""
        if self.max_norm <= 0:
            return scale
        return ((self._norm + 1e-6) / self.max_norm).clamp(min=1.0) * scale

    def local_square(self) -> Tensor:
        """Squared norm of this rank's gradients as they are (under fp16 scaled): finite only if all of them are."""
        pairs = self._gradients()
        if not pairs:
            return torch.zeros((), device=next(iter(self.working_to_master_map)).device)
        squares = squared_norms([local(grad) for _, grad in pairs])
        return own_norms([p for p, _ in pairs], squares.unsqueeze(0), total=True)[0]

    def _compute_grad_norm(self, param_gradient_pairs: list[tuple[Tensor, Tensor]], norm_type: int = 2) -> Tensor:
        """Norm of the gradients as they are, over all ranks that hold parts of the model; plugins that cut it override
        this."""
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: only 2 is computed")
        return self.local_square().sqrt()

    def _step_masters(self, pairs: list[tuple[Tensor, Tensor]], divisor: float | Tensor) -> None:
        divides = isinstance(divisor, Tensor) or divisor != 1
        as_is = self._takes_scale or (self._takes_any and not divides)
        for p, grad in pairs:
            master = self.working_to_master_map[p]
            p.grad = None
            _assign_grad(master, grad, as_is)
        if self._takes_scale:
            self.optim.step(div_scale=divisor)
            return
        if divides:
            grads = [local(self.working_to_master_map[p].grad) for p, _ in pairs]
            for grad in grads:
                grad.div_(divisor.to(grad.device) if isinstance(divisor, Tensor) else divisor)
        self.optim.step()

    @torch.no_grad()
    def _publish(self) -> None:
        pairs = [(p, master) for p, master in self.working_to_master_map.items() if p is not master]
        if pairs:
            torch._foreach_copy_([local(p) for p, _ in pairs], [local(master) for _, master in pairs])

    # -- gradients for users -----------------------------------------------------------------------------------------

    def get_grad_norm(self, norm_type: float = 2, **kwargs) -> float | None:
        """L2 norm of the last step's gradients: unscaled, before clipping; None before the first step that was
        taken."""
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: only 2 is computed")
        return None if self._norm is None else comm.read_scalar(self._norm, default=1.0, what="gradient norm")

    def get_param_grad(self, param: Tensor) -> Tensor | None:
        """The gradient of a model parameter so far, unscaled, in fp32; None where there is none, and after the step."""
        factor = self._window_factor()
        if param.grad is None:
            return None
        grad = param.grad.detach().to(torch.float32, copy=True).div_(self.mixed_precision.get_grad_div_scale())
        return grad if factor is None else grad.mul_(factor.to(grad.device))

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args, **kwargs
    ) -> Tensor:
        """Scale all gradients so that their unscaled norm is at most ``max_norm``; returns the norm before."""
        self._finish_window()
        pairs = self._gradients()
        norm = self._compute_grad_norm(pairs, norm_type) / self.mixed_precision.get_grad_div_scale()
        if error_if_nonfinite and not comm.read_scalar(torch.isfinite(norm), default=True, what="gradient norm is finite"):
            raise RuntimeError("the gradient norm is not finite, so it cannot be clipped: pass error_if_nonfinite=False")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._multiply(factor)
        return norm

    def clip_grad_by_value(self, clip_value: float, *args, **kwargs) -> None:
        """Clamp every element of the unscaled gradients to ``[-clip_value, clip_value]``."""
        self._finish_window()
        bound = clip_value * self.mixed_precision.get_grad_div_scale()
        for _, grad in self._gradients():
            grad.clamp_(-bound, bound)

    # -- masters and state -------------------------------------------------------------------------------------------

    def get_working_to_master_map(self) -> dict[int, Tensor]:
        """``{id(working parameter): master}``."""
        return {id(p): master for p, master in self.working_to_master_map.items()}

    def get_master_to_working_map(self) -> dict[int, Tensor]:
        """``{id(master): working parameter}``."""
        return {id(master): p for master, p in self.master_to_working_map.items()}

    @torch.no_grad()
    def update_master_params(self, model: nn.Module) -> None:
        """Refresh the masters of ``model``'s parameters from its weights, after these were loaded anew."""
        for p in model.parameters():
            master = self.working_to_master_map.get(p)
            if master is not None and master is not p:
                master.copy_(p)

    def state_dict(self) -> dict:
        """The inner optimizer's state, with the masters (``state[i]["master"]``) and, under fp16, the loss scaler
        (``"scaler"``)."""
        out = self.optim.state_dict()
        out["state"] = {index: dict(entry) for index, entry in out["state"].items()}
        for index, master in enumerate(self.parameters):
            if self.master_to_working_map[master] is not master:
                out["state"].setdefault(index, {})[MASTER] = master
        if self.grad_scaler is not None:
            out["scaler"] = self.grad_scaler.state_dict()
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Continue from :meth:`state_dict`, or from a plain optimizer's; saved masters go into masters and working
        weights."""
        states = {index: dict(entry) for index, entry in state_dict["state"].items()}
        masters = {int(index): entry.pop(MASTER) for index, entry in states.items() if MASTER in entry}
        kept = {index: entry for index, entry in states.items() if entry}
        self.optim.load_state_dict({"state": kept, "param_groups": state_dict["param_groups"]})
        parameters = self.parameters
        for index, master in masters.items():
            parameters[index].copy_(master)
        if masters:
            self._publish()
        if self.grad_scaler is not None and state_dict.get("scaler") is not None:
            self.grad_scaler.load_state_dict(state_dict["scaler"])


def _widened(value: Any, p: Tensor) -> Any:
    """State that was made for a 16-bit parameter, as its master needs it."""
    is_like = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
    return value.float() if is_like else value


def _assign_grad(master: Tensor, grad: Tensor, as_is: bool) -> None:
    """Make ``grad`` the master's gradient: the very tensor if the optimizer takes its dtype, else in fp32."""
    if grad.dtype != master.dtype:
        if as_is and hasattr(master, "grad_dtype"):
            master.grad_dtype = None
        else:
            grad = grad.to(master.dtype)
    master.grad = grad
