"""Notices NaN training without making the device wait."""

from typing import Optional

import torch
from torch import Tensor

from colossalai.logging import get_dist_logger


class NonFiniteWatch:
    """Warns, one step late, when a norm that nobody acted on was not finite: outside fp16 no step is skipped."""

    def __init__(self) -> None:
        self._pending: Optional[tuple[Tensor, Optional[torch.cuda.Event]]] = None
        self._told = False

    def push(self, norm: Optional[Tensor]) -> None:
        """Watch ``norm`` (one element); on CUDA its copy to the host runs on."""
        if norm is None or type(norm).__name__ == "FakeTensor":
            return
        if norm.is_cuda:
            copy, event = torch.empty(1, pin_memory=True), torch.cuda.Event()
            copy.copy_(norm.float(), non_blocking=True)
            event.record()
            self._pending = copy, event
        else:
            self._pending = norm.clone(), None
            self.check()

    def check(self) -> None:
        """Warn about the norm pushed last, if it has arrived by now."""
        if self._pending is None:
            return
        norm, event = self._pending
        if event is not None and not event.query():
            return
        self._pending = None
        if not bool(torch.isfinite(norm).all()) and not self._told:
            self._told = True
            get_dist_logger().warning(
                "the gradient norm is not finite (NaN or inf in a loss or gradient): the step was taken all the same, since "
                "only fp16 skips steps",
                ranks=[0],
            )
