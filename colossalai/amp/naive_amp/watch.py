"""Notices numbers that are not finite without making the device wait."""

import torch
from torch import Tensor

from colossalai import comm
from colossalai.comm.fake import is_fake_tensor
from colossalai.logging import get_dist_logger


class NonFiniteWatch:
    """Warns, at most one call late, when a watched number was not finite; each kind of number once.

    Outside fp16 no step is skipped: a NaN goes into the weights, and the least one can do is to say so.
    """

    def __init__(self) -> None:
        self.count = 0
        """Numbers that were not finite, as far as they have arrived."""
        self._arriving: tuple[str, Tensor, torch.cuda.Event | None] | None = None
        self._told: set[str] = set()

    def push(self, what: str, number: Tensor) -> None:
        """Watch ``number`` (one element), called ``what`` in the warning."""
        self.check()
        number = number.detach()
        if is_fake_tensor(number):
            return
        if not number.is_cuda:
            self._judge(what, number)
            return
        if self._arriving is not None:  # rather miss one than wait for it
            return
        copy, event = torch.empty(1, pin_memory=True), torch.cuda.Event()
        copy.copy_(number.float().reshape(1), non_blocking=True)
        event.record()
        self._arriving = what, copy, event

    def check(self) -> None:
        """Judge the number pushed last, if it has arrived by now."""
        if self._arriving is not None and self._arriving[2].query():
            what, number, _ = self._arriving
            self._arriving = None
            self._judge(what, number)

    def _judge(self, what: str, number: Tensor) -> None:
        if bool(torch.isfinite(number).all()):
            return
        self.count += 1
        if what not in self._told:
            self._told.add(what)
            get_dist_logger().warning(
                f"{what} on rank {comm.rank()} is not finite (NaN or inf): training goes on all the same, since only "
                "fp16 skips steps; lower the learning rate or look at the batch"
            )
