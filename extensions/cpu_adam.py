"""Adam on the CPU in one pass over memory (csrc/cpu_adam)."""

import platform
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from .cpp_extension import _CppExtension
from .toolchain import NativeBuildError

if TYPE_CHECKING:
    from torch import Tensor


class CPUAdamOptimizer:
    """The state-less side of Adam: every number comes with the call.

    Args:
        lr, beta1, beta2, eps, weight_decay: kept for callers that read them; ``step`` takes its own.
        adamw_mode: decay the parameter by ``1 - lr * weight_decay`` instead of adding ``weight_decay * p`` to the
            gradient.
    """

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool = True) -> None:
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2
        self.eps, self.weight_decay, self.adamw_mode = eps, weight_decay, adamw_mode

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: "Tensor",
        grad: "Tensor",
        exp_avg: "Tensor",
        exp_avg_sq: "Tensor",
        div_scale: float = -1.0,
        low_precision_copy: "Tensor | None" = None,
    ) -> None:
        """One step of Adam in place.

        With g = grad / div_scale: m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2;
        p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps); decay as ``adamw_mode`` says.

        Args:
            step: the number of this step, from 1.
            param, exp_avg, exp_avg_sq: float32, contiguous, all of one size.
            grad: float32, bfloat16 or float16.
            div_scale: what to divide the gradient by; not positive means 1.
            low_precision_copy: bfloat16 or float16, takes the rounded new parameter in the same pass.
        """
        import torch

        torch.ops.colossalai.cpu_adam_step(
            param, exp_avg, exp_avg_sq, grad, low_precision_copy, step, lr, beta1, beta2, eps, weight_decay,
            1.0 / div_scale if div_scale > 0 else 1.0, self.adamw_mode, bias_correction,
        )  # fmt: skip


class _CpuAdamExtension(_CppExtension):
    machines: tuple[str, ...] = ()

    def sources_files(self) -> list[Path]:
        folder = self.csrc_path() / "cpu_adam"
        return [folder / "bind.cpp", folder / "adam.cpp"]

    def is_available(self) -> bool:
        return platform.machine().lower() in self.machines

    def assert_compatible(self) -> None:
        super().assert_compatible()
        if not self.is_available():
            raise NativeBuildError(f"{self.name} is for {' or '.join(self.machines)}, not for {platform.machine()}")

    def wrap(self, module: ModuleType) -> SimpleNamespace:
        return SimpleNamespace(CPUAdamOptimizer=CPUAdamOptimizer, isa=module.isa, force_isa=module.force_isa)


class CpuAdamX86Extension(_CpuAdamExtension):
    """Adam for x86-64: AVX-512 or AVX2 with FMA where the CPU has them, chosen at run time."""

    machines = ("x86_64", "amd64")

    def __init__(self) -> None:
        super().__init__("cpu_adam_x86")


class CpuAdamArmExtension(_CpuAdamExtension):
    """Adam for 64-bit ARM."""

    machines = ("aarch64", "arm64")

    def __init__(self) -> None:
        super().__init__("cpu_adam_arm")
