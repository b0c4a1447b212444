"""Which torch.distributed backend a name means on this machine."""

import torch.distributed as dist

from ..accelerator import get_accelerator
from ..utils.errors import ConfigError


def resolve_backend(backend: str | None) -> str:
    """The backend to hand to torch.

    ``"nccl"``, upstream's default everywhere, and None mean the accelerator's own; where that is not gloo, tensors in
    host memory get gloo beside it (``"cpu:gloo,cuda:nccl"``), so that CPU chunks and objects have a way too. Any other
    backend is taken at its word. Raises ConfigError for one torch does not know, or was built without.
    """
    accelerator = get_accelerator()
    own = accelerator.communication_backend
    if backend is None or backend.lower() in ("nccl", own):
        return own if own == "gloo" else f"cpu:gloo,{accelerator.name}:{own}"
    backend = backend.lower()
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if name not in dist.Backend.backend_list:
            known = ", ".join(item for item in dist.Backend.backend_list if item != "undefined")
            raise ConfigError(f"backend={backend!r}: torch.distributed knows no {name!r}, only {known}")
        if name != "fake" and not dist.is_backend_available(name):
            raise ConfigError(f"backend={backend!r}: this torch was built without {name}; leave backend out to get {own} here")
    return backend
