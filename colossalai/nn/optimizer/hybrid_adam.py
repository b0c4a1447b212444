from typing import Any

from colossalai.utils.errors import ConfigError

from .cpu_adam import CPUAdam

# Options of other Adams which change the arithmetic, and their value that asks for nothing.
_OTHER_ADAMS = {"amsgrad": False, "maximize": False, "differentiable": False, "capturable": False}


class HybridAdam(CPUAdam):
    """Adam or AdamW for parameters that may lie on the CPU, on a device, or move between them with their state.

    The arguments are those of :class:`CPUAdam`. Any further keyword becomes a default option of the param groups,
    readable as ``group[name]``; options of other Adams that would change the result (``amsgrad=True`` and the like) are
    refused.
    """

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
        **defaults: Any,
    ) -> None:
        for name, neutral in _OTHER_ADAMS.items():
            if defaults.get(name, neutral) not in (neutral, None):
                raise ConfigError(f"HybridAdam has no {name}: leave {name}={defaults[name]!r} out, or use torch.optim.AdamW")
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            adamw_mode,
            nvme_offload_fraction,
            nvme_offload_dir,
        )
        self.defaults.update(defaults)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
