"""Every collective of the library, in one place. `transport` says how each backend is used, `ledger` what is counted.

``group=None`` is the whole world, a rank is a position within the group, and every wait has a time limit. The verbs
with a gradient are in `colossalai.comm.autograd`.
"""

from colossalai.comm import autograd
from colossalai.comm.agree import agree, barrier
from colossalai.comm.collectives import all_gather_into, all_reduce, broadcast, even_bounds, reduce_scatter
from colossalai.comm.fake import fake_world, read_scalar, real_tensors
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
from colossalai.comm.objects import all_gather_object, broadcast_object, gather_object
from colossalai.comm.p2p import gather_pieces, recv, scatter_pieces, send, send_recv
from colossalai.comm.shaped import all_gather, all_to_all, all_to_all_uneven, reduce_scatter_dim, split
from colossalai.comm.work import Work, wait_all

__all__ = [
    "Ledger",
    "Work",
    "agree",
    "all_gather",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_uneven",
    "autograd",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_object",
    "default_timeout",
    "even_bounds",
    "fake_world",
    "gather_object",
    "gather_pieces",
    "global_ranks",
    "is_fake",
    "is_gloo",
    "is_member",
    "new_group",
    "rank",
    "read_scalar",
    "real_tensors",
    "record",
    "recv",
    "reduce_scatter",
    "reduce_scatter_dim",
    "scatter_pieces",
    "send",
    "send_recv",
    "split",
    "wait_all",
    "world_size",
]
