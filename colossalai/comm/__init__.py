"""Every collective of the library, in one place; see `collectives` for how each backend is used and `ledger` for what is counted.

``group=None`` is the whole world, a rank is a position within the group, and every wait has a time limit.
"""

from colossalai.comm.collectives import all_gather_into, all_reduce, broadcast, even_bounds, reduce_scatter
from colossalai.comm.groups import (
    backend_name,
    default_timeout,
    global_ranks,
    is_fake,
    is_gloo,
    is_member,
    new_group,
    rank,
    world_size,
)
from colossalai.comm.ledger import Ledger, record
from colossalai.comm.work import Work, wait_all

__all__ = [
    "Ledger",
    "Work",
    "all_gather_into",
    "all_reduce",
    "backend_name",
    "broadcast",
    "default_timeout",
    "even_bounds",
    "global_ranks",
    "is_fake",
    "is_gloo",
    "is_member",
    "new_group",
    "rank",
    "record",
    "reduce_scatter",
    "wait_all",
    "world_size",
]
