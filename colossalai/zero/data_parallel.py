"""Stage 0: whole parameters, gradients and states on every rank; buckets of gradients are averaged as backward fills them.

It serves wherever torch's DDP cannot run (its C++ reducer accepts no fake tensor), with DDP's volume: one all-reduce of P
elements a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.interface import ModelWrapper, OptimizerWrapper

from .bucket import Slot, make_buckets
from .reducer import GradReducer


class DataParallelModel(ModelWrapper):
    """The module with its trainable parameters in stage-0 buckets.

    Args:
        bucket_bytes: size of a bucket.
        group: ranks to average over.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20, group=None) -> None:
        super().__init__(module)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        slots = [Slot(param, index, name) for index, (name, param) in enumerate(trainable)]
        width = slots[0].param.element_size() if slots else 4
        self.reducer = GradReducer(make_buckets(slots, group, max(1, int(bucket_bytes) // width)), stage=0)
        for bucket in self.reducer.buckets:
            comm.broadcast(bucket.flat, src=0, group=group)
        self.require_grad_sync = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to this rank's gradients."""
        before, self.require_grad_sync = self.require_grad_sync, False
        try:
            yield
        finally:
            self.require_grad_sync = before


class DataParallelOptimizer(OptimizerWrapper):
    """The user's optimizer over the whole parameters of a :class:`DataParallelModel`."""

    def __init__(self, optim: Optimizer, model: DataParallelModel) -> None:
        super().__init__(optim)
        self.model = model

    def backward(self, loss: Tensor, inputs=None, retain_graph: bool = False, **kwargs) -> None:
        self.model.reducer.begin(sync=self.model.require_grad_sync)
        super().backward(loss, inputs, retain_graph, **kwargs)
        self.model.reducer.flush()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor | None, inputs=None, retain_graph: bool = False) -> None:
        self.model.reducer.begin(sync=self.model.require_grad_sync)
        super().backward_by_grad(tensor, grad, inputs, retain_graph)
        self.model.reducer.flush()

    def _finish_window(self) -> None:
        self.model.reducer.close()  # after loss.backward() by the user's own hand
        super()._finish_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.reducer.reset(stepped=True)
        super().zero_grad(set_to_none=True)
