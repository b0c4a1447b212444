"""A world of N ranks in one process, for dry runs: nothing travels, and by default no tensor has memory.

[Note: what a fake world can do]
Process groups, every verb of `colossalai.comm`, autograd and optimizers work, and a ledger recorded inside is that of a
real run. Values are wrong: an all-reduce is the identity, a gathered tensor is this rank's part repeated. So nothing
may depend on data; where one number is needed, `read_scalar` answers with a stated stand-in. Device meshes must be made
where tensors are real (`real_tensors`), because they look at their own rank tensors. Fake tensors must be CPU tensors
on a machine without CUDA.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from colossalai.comm.ledger import note_stand_in
from colossalai.utils.errors import ConfigError

__all__ = ["fake_world", "read_scalar", "real_tensors"]


@contextmanager
def fake_world(rank: int, world_size: int, fake_tensors: bool = True) -> Iterator[FakeTensorMode | None]:
    """Be rank ``rank`` of ``world_size`` inside the block.

    Args:
        rank, world_size: which rank of how many.
        fake_tensors: True: tensors have shapes and no memory (`FakeTensorMode`, entered here and handed out).
            False: tensors and kernels are real, only communication is not: one accelerator standing for N.

    Everything is undone at the end: the mode is left and the process groups are destroyed.
    ConfigError where a process group exists already.
    """
    if dist.is_initialized():
        raise ConfigError("fake_world needs a process without a process group: leave it, or call destroy_process_group first")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be within 0..{world_size - 1} for world_size={world_size}")
    # Only dry runs need it, and importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    # Real tensors that were made outside may meet fake ones inside: constants, random states, data of the caller.
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake_tensors else None
    try:
        with mode if mode is not None else nullcontext():
            yield mode
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def real_tensors() -> AbstractContextManager[Any]:
    """A block in which tensors are real even inside a `fake_world`, for device meshes; does nothing elsewhere."""
    return unset_fake_temporarily()


def read_scalar(tensor: torch.Tensor, default: Any, what: str = "scalar") -> Any:
    """``tensor.item()``; where the tensor is fake ``default``, listed as ``what`` in open ledgers.

    Every host-side read of a tensor's value in the library goes through here. On an accelerator it waits for it.
    """
    if is_fake_tensor(tensor):
        note_stand_in(what, default)
        return default
    return tensor.item()


def is_fake_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or the local part of a DTensor, has no data."""
    return isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor)
