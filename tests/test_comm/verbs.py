"""Every verb once, on any world: what the ledger tests run for real, under an observer, and in a fake world."""

import torch

from colossalai import comm


def run_every_verb(rank: int, world_size: int) -> None:
    """Calls with sizes that depend on the rank where a verb allows it."""
    n, after, before = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    flat = torch.ones(12 * n)
    uneven = [0, *(5 * index for index in range(1, n)), 12 * n]
    comm.all_reduce(flat, op="mean")
    comm.all_reduce(flat.bfloat16())
    comm.all_reduce(torch.ones(3, dtype=torch.int64), op="max")
    comm.reduce_scatter(flat, comm.even_bounds(12 * n, n))
    comm.reduce_scatter(flat.bfloat16(), uneven, op="mean", out_dtype=torch.float32)
    comm.all_gather_into(flat, comm.even_bounds(12 * n, n))
    comm.all_gather_into(flat.half(), uneven)
    comm.broadcast(flat, 1)
    comm.all_gather(torch.ones(2, 3), 1)
    comm.reduce_scatter_dim(torch.ones(2, 3 * n), 1)
    comm.all_to_all(torch.ones(2, 3 * n), 1, 0)
    sent = [(rank + other) % 3 for other in range(n)]
    comm.all_to_all_uneven(torch.ones(sum(sent), 4), sent, sent)
    comm.send_recv([(torch.ones(5), after)], [(torch.empty(5), before)])
    sizes = list(range(n))
    whole = comm.gather_pieces(torch.ones(sizes[rank]), sizes, 1)
    comm.scatter_pieces(whole, torch.empty(sizes[rank]), sizes, 1)
    comm.all_gather_object("abc")
    comm.gather_object("abc", 1)
    comm.broadcast_object("abc")
    x = torch.ones(2, 2 * n, requires_grad=True)
    y = comm.autograd.reduce(comm.autograd.copy(x) * 2)
    y = comm.autograd.gather(comm.autograd.scatter(y, 1), 1)
    y = comm.autograd.reduce_scatter(comm.autograd.gather_reduce(y, 0), 0)
    y = comm.autograd.shift(comm.autograd.exchange(y, 1, 0), 1)
    y.sum().backward()
    comm.barrier()
