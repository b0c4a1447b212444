"""NVIDIA and AMD devices, through torch.cuda."""

import torch

from .base_accelerator import BaseAccelerator


class CudaAccelerator(BaseAccelerator):
    """The devices of ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__(name="cuda", communication_backend="nccl")

    def get_version(self) -> str:
        return torch.version.cuda or torch.version.hip or ""
