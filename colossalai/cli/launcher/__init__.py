"""``colossalai run``: a thin layer over ``python -m torch.distributed.run``, on this machine or on several over ssh."""

from .run import run

__all__ = ["run"]
