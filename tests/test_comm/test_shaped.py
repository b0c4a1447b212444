"""Collectives along a dimension, messages, pieces and objects, against one process."""

import warnings

import pytest
import torch

from colossalai import comm
from colossalai.utils.errors import ConfigError
from tests.test_comm.data import make, rounded_sum, stack

pytestmark = pytest.mark.fast

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit by bit: float8 has no comparison of its own."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def shaped_everything(rank, world_size):
    warnings.simplefilter("error")
    n = world_size
    for dtype in DTYPES:
        shape = (2, 3, n * 2, 5)
        mine = make(rank, shape, dtype)
        for dim in range(-4, 4):
            whole = torch.cat([make(other, shape, dtype).view(torch.uint8) for other in range(n)], dim)
            assert same(comm.all_gather(mine, dim).view(torch.uint8), whole), (dtype, dim)
        received = comm.all_to_all(mine, scatter_dim=2, gather_dim=1)
        mine_of = [make(other, shape, dtype)[:, :, 2 * rank : 2 * rank + 2] for other in range(n)]
        parts = [part.contiguous().view(torch.uint8) for part in mine_of]
        assert same(received.view(torch.uint8), torch.cat(parts, 1))
        assert same(comm.all_to_all(received, scatter_dim=1, gather_dim=2), mine)
        assert same(comm.split(mine, 2), mine[:, :, 2 * rank : 2 * rank + 2])
    for dtype in (torch.float32, torch.bfloat16):
        for dim, op in ((0, "sum"), (1, "mean"), (-1, "sum")):
            shape = [2, 3, 4]
            shape[dim] *= n
            part = comm.reduce_scatter_dim(make(rank, shape, dtype), dim, op=op)
            expected = rounded_sum(stack(n, shape, dtype), op).chunk(n, dim)[rank]
            assert same(part, expected), (dtype, dim)
    assert comm.all_gather(torch.empty(0, 3)).shape == (0, 3)
    assert comm.all_to_all(torch.empty(0, n), 1, 0).shape == (0, 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_dimensions_equal_one_process(workers, world_size):
    workers(world_size).run(shaped_everything)


def uneven_everything(rank, world_size):
    warnings.simplefilter("error")
    rows = [[(3 * src + dst) % 4 for dst in range(world_size)] for src in range(world_size)]
    assert any(0 in row for row in rows)
    for dtype in DTYPES:
        for inner in ((5,), (2, 3), ()):
            source = [make(src, (sum(rows[src]), *inner), dtype) for src in range(world_size)]
            taken = comm.all_to_all_uneven(source[rank], rows[rank], [row[rank] for row in rows])
            parts = [part.split(rows[src])[rank].contiguous().view(torch.uint8) for src, part in enumerate(source)]
            assert same(taken.view(torch.uint8), torch.cat(parts)), (dtype, inner)
    # Everything to rank 0, and nothing at all.
    taken = comm.all_to_all_uneven(make(rank, (4, 2)), [4] + [0] * (world_size - 1), [4 if rank == 0 else 0] * world_size)
    assert taken.shape == ((4 * world_size, 2) if rank == 0 else (0, 2))
    zeros = [0] * world_size
    assert comm.all_to_all_uneven(torch.empty(0, 2), zeros, zeros).shape == (0, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_all_to_all_equals_one_process(workers, world_size):
    workers(world_size).run(uneven_everything)


def messages(rank, world_size):
    warnings.simplefilter("error")
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype in DTYPES:
        got = torch.empty(4, 3, dtype=dtype).t()
        empty = torch.empty(0, dtype=dtype)
        sends = [(make(rank, (3, 4), dtype), after), (make(rank, 5, dtype, seed=1), after), (empty, after)]
        second = torch.empty(5, dtype=dtype)
        comm.send_recv(sends, [(got, before), (second, before), (empty, before)], async_op=True).wait()
        assert same(got, make(before, (3, 4), dtype)) and same(second, make(before, 5, dtype, seed=1))
    if rank == 0:
        comm.send(torch.arange(3), 1)
    elif rank == 1:
        tensor = torch.zeros(3, dtype=torch.int64)
        comm.recv(tensor, 0)
        assert tensor.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="itself"):
        comm.send(torch.ones(1), rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_arrive_in_order(workers, world_size):
    workers(world_size).run(messages)


def pieces_everything(rank, world_size):
    warnings.simplefilter("error")
    for dtype in (*DTYPES, torch.complex64):
        for sizes in ([5] * world_size, [0, 7, 3][:world_size], [9] + [0] * (world_size - 1)):
            for peer in range(world_size):
                parts = [make(src, size, dtype) for src, size in enumerate(sizes)]
                kept = parts[rank].clone()
                whole = comm.gather_pieces(parts[rank], sizes, dst=peer)
                assert (whole is None) == (rank != peer)
                expected = torch.cat([part.view(torch.uint8) for part in parts])
                assert whole is None or same(whole.view(torch.uint8), expected)
                assert same(parts[rank], kept), "a piece was overwritten"
                out = torch.zeros(sizes[rank], dtype=dtype)
                assert comm.scatter_pieces(whole, out, sizes, src=peer) is out
                assert same(out, kept)


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_are_assembled_and_dealt_out(workers, world_size):
    workers(world_size).run(pieces_everything)


def objects_everything(rank, world_size):
    warnings.simplefilter("error")
    mine = {"rank": rank, "text": "x" * (100 * rank), "tensor": torch.full((rank + 1,), rank)}
    everyone = comm.all_gather_object(mine)
    assert [entry["rank"] for entry in everyone] == list(range(world_size))
    assert [entry["tensor"].tolist() for entry in everyone] == [[r] * (r + 1) for r in range(world_size)]
    gathered = comm.gather_object(rank * 10, dst=1)
    assert gathered == ([10 * other for other in range(world_size)] if rank == 1 else None)
    assert comm.broadcast_object(mine if rank == 1 else None, src=1)["rank"] == 1
    # An object over one page and a mebibyte.
    assert len(comm.broadcast_object(b"a" * 2_000_000 if rank == 0 else None)) == 2_000_000


@pytest.mark.parametrize("world_size", [2, 3])
def test_objects(workers, world_size):
    workers(world_size).run(objects_everything)


def test_one_process_without_a_launcher():
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_gather(x, 1) is x and comm.all_to_all(x, 0, 1) is x and comm.reduce_scatter_dim(x, 1) is x
    assert comm.all_to_all_uneven(x, [2], [2]) is x
    assert comm.gather_pieces(x.view(-1), [6], 0).tolist() == x.view(-1).tolist()
    assert comm.scatter_pieces(x.view(-1), torch.zeros(6), [6], 0).tolist() == x.view(-1).tolist()
    assert comm.all_gather_object(3) == [3] and comm.gather_object(3) == [3] and comm.broadcast_object(3) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: comm.all_gather(torch.ones(2), 1), "dim=1 is no dimension"),
        (lambda: comm.all_to_all_uneven(torch.ones(2), [1], [1]), "must sum to dim 0"),
        (lambda: comm.all_to_all_uneven(torch.ones(2), [1, 1], [2]), "in_splits=.* must be 1 counts"),
        (lambda: comm.all_to_all_uneven(torch.ones(2), [2], [1]), "to itself but expects 1"),
        (lambda: comm.gather_pieces(torch.ones(2), [3], 0), r"says \(3,\)"),
        (lambda: comm.gather_pieces(torch.ones(2), [2, 0], 0), "sizes="),
        (lambda: comm.scatter_pieces(None, torch.ones(2), [2], 0), r"whole must be of shape \(2,\)"),
        (lambda: comm.gather_object(1, dst=2), "dst=2"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def does_not_divide(rank, world_size):
    with pytest.raises(ConfigError, match="dim=1 of shape .* does not divide by the group's 2 ranks"):
        comm.reduce_scatter_dim(torch.ones(2, 3), 1)
    with pytest.raises(ConfigError, match="scatter_dim=0"):
        comm.all_to_all(torch.ones(3, 2), 0, 1)


def test_a_dimension_that_does_not_divide_is_named(workers):
    workers(2).run(does_not_divide)
