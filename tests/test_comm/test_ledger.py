"""The ledger against an observer that knows only torch.distributed, and against formulas."""

import pytest
import torch
import torch.distributed as dist

from colossalai import comm
from tests.test_comm.verbs import run_every_verb

pytestmark = pytest.mark.fast


class Observer:
    """Counts bytes and calls by wrapping torch's functions; what a rank gives to itself counts apart."""

    NAMES = ("all_reduce", "all_to_all_single", "broadcast", "batch_isend_irecv")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.bytes = dict.fromkeys(self.NAMES, 0)
        self.calls = dict.fromkeys(self.NAMES, 0)
        self.left_here = 0

    def __enter__(self):
        self.kept = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self._wrap(name))
        return self

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)

    def _wrap(self, name):
        def call(*args, **kwargs):
            self.calls[name] += 1
            if name == "batch_isend_irecv":
                self.bytes[name] += sum(op.tensor.nbytes for op in args[0] if op.op is self.kept_isend)
            else:
                tensor = args[1] if name == "all_to_all_single" else args[0]
                self.bytes[name] += tensor.nbytes
                if name == "all_to_all_single":
                    splits = kwargs.get("input_split_sizes") or [tensor.shape[0] // self.world_size] * self.world_size
                    self.left_here += splits[self.rank] * tensor.nbytes // max(tensor.shape[0], 1)
            return self.kept[name](*args, **kwargs)

        return call

    kept_isend = staticmethod(dist.isend)


def observe_everything(rank, world_size):
    n, nbytes = world_size, 4 * 60 * world_size
    bounds = comm.even_bounds(60 * n, n)
    uneven = [0, 7, *([60 * n] * (n - 1))]

    def both(verb, *args):
        with comm.record() as ledger, Observer(rank, n) as seen:
            verb(*args)
        return ledger, seen

    flat = torch.ones(60 * n)
    ledger, seen = both(comm.all_reduce, flat)
    assert ledger.bytes("all_reduce") == seen.bytes["all_reduce"] == nbytes
    assert ledger.wire_bytes() == pytest.approx(2 * nbytes * (n - 1) / n)
    for cut in (bounds, uneven):
        for dtype in (torch.float32, torch.bfloat16):
            buffer = flat.to(dtype)
            ledger, seen = both(comm.reduce_scatter, buffer, cut)
            assert ledger.bytes("reduce_scatter") == seen.bytes["all_to_all_single"] == buffer.nbytes
            assert ledger.calls() == sum(seen.calls.values()) == 1
            if cut is bounds:
                assert ledger.wire_bytes() == seen.bytes["all_to_all_single"] - seen.left_here
            ledger, seen = both(comm.all_gather_into, buffer, cut)
            assert ledger.bytes("all_gather_into") == seen.bytes["broadcast"] == buffer.nbytes
    ledger, seen = both(comm.broadcast, flat, 1)
    assert ledger.bytes("broadcast") == seen.bytes["broadcast"] == nbytes
    ledger, seen = both(comm.all_to_all, flat.view(n, 60), 0, 1)
    assert ledger.bytes("all_to_all") == seen.bytes["all_to_all_single"] == nbytes
    assert ledger.wire_bytes() == nbytes - seen.left_here
    ledger, seen = both(comm.all_to_all_uneven, torch.ones(3 * n, 2), [3] * n, [3] * n)
    assert ledger.bytes() == seen.bytes["all_to_all_single"] and ledger.wire_bytes() == ledger.bytes() - seen.left_here
    ledger, seen = both(comm.send_recv, [(flat, (rank + 1) % n)], [(flat.clone(), (rank - 1) % n)])
    assert ledger.bytes("send") == ledger.bytes("recv") == seen.bytes["batch_isend_irecv"] == ledger.wire_bytes() == nbytes
    sizes = [10 * (index + 1) for index in range(n)]
    ledger, seen = both(comm.gather_pieces, torch.ones(sizes[rank]), sizes, 0)
    assert ledger.bytes() == 4 * sum(sizes) and ledger.wire_bytes() == seen.bytes["batch_isend_irecv"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_c85_ledger_equals_an_outside_observer(workers, world_size):
    workers(world_size).run(observe_everything)


def queries(rank, world_size):
    group = comm.new_group([0, 2], name="pair")
    with comm.record() as outer:
        comm.all_reduce(torch.ones(8))
        with comm.record() as inner:
            if rank != 1:
                comm.all_reduce(torch.ones(4, dtype=torch.float64), group)
                comm.broadcast(torch.ones(2), 0, group)
        comm.broadcast(torch.ones(2), 0)
    comm.all_reduce(torch.ones(99))
    expected = [] if rank == 1 else [("all_reduce", (0, 2), "pair"), ("broadcast", (0, 2), "pair")]
    assert list(inner.rows()) == expected
    assert outer.calls() == 2 + len(expected) and outer.calls("broadcast", [0, 1, 2]) == 1
    if rank != 1:
        assert inner.bytes() == 40 and inner.elements("all_reduce", group) == 4
        assert outer.bytes("all_reduce") == 64 and outer.bytes("all_reduce", "pair") == outer.bytes("all_reduce", (0, 2)) == 32
        assert outer.bytes(group="world") == 40
    return outer.table()


def test_ledgers_nest_and_answer_by_verb_and_group(workers):
    tables = workers(3).run(queries)
    lines = tables[0].splitlines()
    assert lines[0].split() == ["verb", "group", "calls", "elements", "payload", "bytes", "wire", "bytes"]
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce", "world", "[0..2]", "1", "8", "32", "43"],
        ["all_reduce", "pair", "[0,2]", "1", "4", "32", "32"],
        ["broadcast", "world", "[0..2]", "1", "2", "8", "5"],
        ["broadcast", "pair", "[0,2]", "1", "2", "8", "4"],
    ]


def gradients_too(rank, world_size):
    with comm.record() as ledger:
        run_every_verb(rank, world_size)
    return {verb: row.calls for (verb, _, _), row in ledger.rows().items()}


def test_every_verb_is_counted_also_in_backward(workers):
    calls = workers(3).run(gradients_too)
    assert calls[0] == calls[1] == calls[2]
    assert calls[0] == {
        "all_reduce": 3 + 2,
        "reduce_scatter": 2,
        "all_gather_into": 2,
        "broadcast": 1,
        "all_gather": 1 + 4,
        "reduce_scatter_dim": 1 + 2,
        "all_to_all": 1 + 2,
        "all_to_all_uneven": 1,
        "send": 1 + 2,
        "recv": 1 + 2,
        "gather_pieces": 1,
        "scatter_pieces": 1,
        "all_gather_object": 1,
        "gather_object": 1,
        "broadcast_object": 1,
    }


def test_one_process_moves_nothing():
    with comm.record() as ledger:
        comm.all_reduce(torch.ones(4))
        comm.all_gather_object(1)
    assert ledger.rows() == {} and ledger.bytes() == 0 and ledger.table().startswith("verb")
