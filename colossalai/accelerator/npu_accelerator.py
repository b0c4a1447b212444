"""Ascend devices, through torch.npu, which the package torch_npu adds to torch."""

import importlib
import importlib.util

import torch

from .base_accelerator import BaseAccelerator


class NpuAccelerator(BaseAccelerator):
    """The devices of ``torch.npu``."""

    def __init__(self) -> None:
        super().__init__(name="npu", communication_backend="hccl")

    def is_available(self) -> bool:
        if not hasattr(torch, "npu"):
            if importlib.util.find_spec("torch_npu") is None:
                return False
            try:
                importlib.import_module("torch_npu")
            except (ImportError, OSError):
                return False  # installed, but its driver is not: as good as absent
        return torch.npu.is_available()

    def get_version(self) -> str:
        return getattr(torch.version, "cann", None) or ""
