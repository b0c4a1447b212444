import torch

from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import refuse_pending_arguments

from .adam import AdamRule
from .base import TensorOptimizer, check_betas, check_hyper
from .flat import Row, Scale, local


class CPUAdam(TensorOptimizer):
    """Adam or AdamW in one pass over memory, on the CPU and on any device.

    Args:
        model_params: parameters, or groups of them, as for every torch optimizer.
        bias_correction: divide the moments by ``1 - beta^step``.
        adamw_mode: decoupled weight decay (AdamW); else ``weight_decay * p`` is added to the gradient.
        nvme_offload_fraction: part of the state kept on disk. Comes with Gemini; anything but 0 raises NotBuiltError.
        nvme_offload_dir: where that state would go; without effect at fraction 0.

    The state of a parameter is ``step`` (int), ``exp_avg`` and ``exp_avg_sq`` (the parameter's shape, dtype and
    device). Gradients may be of a lower dtype than their parameter and are then converted piece by piece.

    Raises:
        ConfigError: for numbers out of range.
    """

    num_fp32_shards_per_param = 4
    """Float32 tensors a parameter needs with this optimizer: master, gradient and two moments."""

    def __init__(
        self,
        model_params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        check_hyper("lr", lr)
        check_betas(betas)
        check_hyper("eps", eps)
        check_hyper("weight_decay", weight_decay)
        if not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ConfigError(f"nvme_offload_fraction={nvme_offload_fraction!r} must be between 0 and 1")
        refuse_pending_arguments(type(self).__name__, nvme_offload_fraction=nvme_offload_fraction or None)
        self.adamw_mode = adamw_mode
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(model_params, defaults)

    @torch.no_grad()
    def step(self, closure=None, div_scale: Scale = -1):
        """Update all parameters that have a gradient; returns the loss of ``closure``, if one is given.

        Args:
            closure: evaluated first, with gradients enabled.
            div_scale: gradients are divided by it where it is positive: a loss scale times a clipping factor. It may be
                a tensor of one element, which is then never read by the host.
        """
        loss = self._loss_of(closure)
        for group in self.param_groups:
            rule = AdamRule(
                group["lr"],
                group["betas"],
                group["eps"],
                group["weight_decay"],
                self.adamw_mode,
                group["bias_correction"],
            )
            for step, rows in self._rows_by_step(group).items():
                rule.apply(rows, step, div_scale)
        return loss

    def _rows_by_step(self, group: dict) -> dict[int, list[Row]]:
        """Rows of the parameters with a gradient by the number of their step, which is counted up here."""
        rows: dict[int, list[Row]] = {}
        for p, grad in self._with_grad(group):
            state = self.state[p]
            # FusedAdam's checkpoints count in the group; torch's count in a tensor.
            step = int(state.get("step", group.get("step", 0))) + 1
            state["step"] = step
            moments = self._state_like(p, "exp_avg", "exp_avg_sq")
            rows.setdefault(step, []).append((local(p), local(grad), *moments))
        return rows
