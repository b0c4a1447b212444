"""Apply one fused kernel to many tensors."""

from collections.abc import Callable
from typing import Any

import torch


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``, the calling convention of fused kernels.

    Attributes:
        chunk_size: the elements one block of the kernel works on.
        available: whether it can be used; it always can, since the operation brings its own kernel.
    """

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
