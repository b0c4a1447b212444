"""The flat collectives against one process, for every dtype, even, uneven and empty slices, now and later."""

import warnings

import pytest
import torch

from colossalai import comm
from colossalai.comm import transport
from colossalai.utils.errors import ConfigError
from tests.test_comm.data import FLOATS, INTEGERS, make, rounded_sum, stack

pytestmark = pytest.mark.fast


def bounds_of(world_size: int) -> list:
    """Even, uneven, empty in several places, not starting at 0, all empty."""
    cases = [[4 * rank for rank in range(world_size + 1)], [0, *(7 * rank + 3 for rank in range(1, world_size + 1))]]
    cases.append([0] * world_size + [11])
    cases.append([0] + [11] * world_size)
    cases.append([5 + 6 * rank for rank in range(world_size + 1)])
    cases.append([3] * (world_size + 1))
    if world_size > 2:
        cases.append([0, 5, 5, *range(8, 8 + world_size - 2)])
    return cases


def reduce_scatter_everything(rank, world_size):
    warnings.simplefilter("error")
    checked = 0
    for bounds in bounds_of(world_size):
        low, high = bounds[rank], bounds[rank + 1]
        for dtype in (*FLOATS, *INTEGERS):
            pieces = stack(world_size, 40, dtype)
            for op in ("sum", "mean") if dtype.is_floating_point else ("sum",):
                flat = pieces[rank].clone()
                slice_, work = comm.reduce_scatter(flat, bounds, op=op, async_op=True)
                work.wait()
                expected = rounded_sum(pieces, op)[low:high]
                assert slice_.dtype == dtype and torch.equal(slice_, expected), (bounds, dtype, op)
                assert torch.equal(flat, pieces[rank]), "the input changed"
                out = flat[low:high]
                same, _ = comm.reduce_scatter(flat, bounds, op=op, out=out)
                assert torch.equal(out, expected) and same.data_ptr() == out.data_ptr()
                assert torch.equal(flat[:low], pieces[rank][:low]) and torch.equal(flat[high:], pieces[rank][high:])
                checked += 1
        halves = stack(world_size, 40, torch.bfloat16)
        wide, _ = comm.reduce_scatter(halves[rank].clone(), bounds, op="mean", out_dtype=torch.float32)
        assert torch.equal(wide, rounded_sum(halves, "mean", torch.float32)[low:high])
    return checked


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_equals_one_process(workers, world_size):
    results = workers(world_size).run(reduce_scatter_everything)
    assert results == [len(bounds_of(world_size)) * (2 * len(FLOATS) + len(INTEGERS))] * world_size


def all_gather_everything(rank, world_size):
    warnings.simplefilter("error")
    others = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    for bounds in bounds_of(world_size):
        for dtype in (*FLOATS, *INTEGERS, *others):
            for async_op in (False, True):
                whole = make(77, 40, dtype)
                flat = make(rank, 40, dtype, seed=5)
                before = flat.clone()
                flat[bounds[rank] : bounds[rank + 1]] = whole[bounds[rank] : bounds[rank + 1]]
                comm.all_gather_into(flat, bounds, async_op=async_op).wait()
                expected = before.clone()
                expected[bounds[0] : bounds[-1]] = whole[bounds[0] : bounds[-1]]
                assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8)), (bounds, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_into_equals_one_process(workers, world_size):
    workers(world_size).run(all_gather_everything)


def all_reduce_everything(rank, world_size):
    warnings.simplefilter("error")
    shapes = ((), (7,), (3, 5), (0,))
    for shape in shapes:
        for dtype in (*FLOATS, *INTEGERS):
            pieces = stack(world_size, shape, dtype)
            expected = {"sum": rounded_sum(pieces), "max": pieces.amax(0), "min": pieces.amin(0)}
            if dtype.is_floating_point:
                expected["mean"] = rounded_sum(pieces, "mean")
            for op, value in expected.items():
                tensor = pieces[rank].clone()
                comm.all_reduce(tensor, op=op, async_op=True).wait()
                # The backend's order of summation: an ulp apart at three ranks, and so perhaps one rounding in 16 bits.
                bound = 0.0 if world_size == 2 or op in ("max", "min") else 4 * _epsilon(dtype)
                torch.testing.assert_close(tensor, value, rtol=bound, atol=bound)
    flags = torch.tensor([rank == 0, False, True])
    comm.all_reduce(flags, op="max")
    assert flags.tolist() == [True, False, True]
    strided = stack(world_size, (4, 6))[rank].t()
    comm.all_reduce(strided)
    torch.testing.assert_close(strided, stack(world_size, (4, 6)).sum(0).t())
    leaf = torch.ones(3, requires_grad=True)
    comm.all_reduce(leaf)
    assert leaf.tolist() == [world_size] * 3 and leaf.grad_fn is None


def _epsilon(dtype):
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_equals_one_process(workers, world_size):
    workers(world_size).run(all_reduce_everything)


def mean_of_large_halves(rank, world_size):
    big = torch.full((world_size * 8,), 60000.0, dtype=torch.float16)
    slice_, _ = comm.reduce_scatter(big.clone(), comm.even_bounds(big.numel(), world_size), op="mean")
    comm.all_reduce(big, op="mean")
    # Adding 1 to 256 is lost in bfloat16, adding 2 is not: whichever rank is added first, one element would show it.
    grains = torch.ones(world_size, dtype=torch.bfloat16)
    grains[rank] = 256
    comm.all_reduce(grains)
    return slice_.unique().tolist(), big.unique().tolist(), grains.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_16_bit_means_do_not_overflow_and_sums_are_rounded_once(workers, world_size):
    for slice_, reduced, grains in workers(world_size).run(mean_of_large_halves):
        assert slice_ == [60000.0] and reduced == [60000.0]
        assert grains == [torch.tensor(256.0 + world_size - 1).bfloat16().item()] * world_size


def broadcast_everything(rank, world_size):
    warnings.simplefilter("error")
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.float8_e4m3fn):
        for src in range(world_size):
            tensor = make(rank, (3, 4), dtype)
            comm.broadcast(tensor, src, async_op=True).wait()
            assert torch.equal(tensor.view(torch.uint8), make(src, (3, 4), dtype).view(torch.uint8))
    strided = make(rank, (3, 4)).t()
    comm.broadcast(strided, 1)
    assert torch.equal(strided, make(1, (3, 4)).t())


def test_broadcast_equals_one_process(workers):
    workers(3).run(broadcast_everything)


def in_a_subgroup(rank, world_size):
    """Ranks 1 and 2: rank 1 is the group's rank 0."""
    with pytest.raises(ConfigError, match=r"ranks=\[2, 1\] must ascend"):
        comm.new_group([2, 1])
    group = comm.new_group([1, 2], name="pair")
    if rank == 0:
        with pytest.raises(ConfigError, match="not a member"):
            comm.all_reduce(torch.ones(1), group)
        return None
    flat = make(rank, 10)
    slice_, _ = comm.reduce_scatter(flat, [0, 3, 10], group)
    pieces = torch.stack([make(1, 10), make(2, 10)])
    mine = slice(0, 3) if rank == 1 else slice(3, 10)
    assert torch.equal(slice_, rounded_sum(pieces)[mine])
    tensor = make(rank, 4)
    comm.broadcast(tensor, src=0, group=group)
    assert torch.equal(tensor, make(1, 4))
    return comm.rank(group), comm.global_ranks(group)


def test_ranks_are_those_of_the_group(workers):
    assert workers(3).run(in_a_subgroup) == [None, (0, (1, 2)), (1, (1, 2))]


def reduce_in_buckets(rank, world_size):
    """The same 30,000 sums, in one buffer and in buckets of several sizes."""
    numel = 30_000
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        flat = make(rank, numel, dtype)
        for bucket in (numel, 7_000, 1_001):
            total = torch.empty(numel, dtype=dtype)
            works = []
            for low in range(0, numel, bucket):
                part = flat[low : low + bucket].clone()
                step = -(-part.numel() // world_size)
                bounds = [min(index * step, part.numel()) for index in range(world_size + 1)]
                out = part[bounds[rank] : bounds[rank + 1]]
                works.append((low, part, bounds, comm.reduce_scatter(part, bounds, op="mean", out=out, async_op=True)[1]))
            for *_, work in reversed(works):
                work.wait()
            for low, part, bounds, _ in works:
                comm.all_gather_into(part, bounds)
                total[low : low + part.numel()] = part
            results[(str(dtype), bucket)] = total
    return results


@pytest.mark.parametrize("world_size", [3, 4])
def test_bits_do_not_depend_on_buckets(workers, world_size):
    by_rank = workers(world_size).run(reduce_in_buckets)
    for dtype in (torch.float32, torch.bfloat16):
        expected = rounded_sum(stack(world_size, 30_000, dtype), "mean")
        for results in by_rank:
            for bucket in (30_000, 7_000, 1_001):
                assert torch.equal(results[(str(dtype), bucket)], expected), (dtype, bucket)


def large_and_reused(rank, world_size):
    """Past the size from which receive buffers are kept, several in flight, waited for twice."""
    numel = 3 << 19
    bounds = comm.even_bounds(numel, world_size)
    flats = [make(rank, numel, seed=seed) for seed in range(4)]
    for _ in range(2):
        pairs = [comm.reduce_scatter(flat, bounds, async_op=True) for flat in flats]
        for _, work in pairs:
            work.wait()
            work.wait()
        for seed, (slice_, _) in enumerate(pairs):
            expected = rounded_sum(stack(world_size, numel, seed=seed))[bounds[rank] : bounds[rank + 1]]
            assert torch.equal(slice_, expected)
    halves = flats[0].bfloat16()
    comm.all_reduce(halves)
    torch.testing.assert_close(halves, rounded_sum(stack(world_size, numel, torch.bfloat16)), rtol=0.01, atol=0.01)


def test_receive_buffers_are_not_shared_while_in_flight(workers):
    workers(3).run(large_and_reused)


def test_receive_buffers_are_kept_and_never_handed_out_twice():
    staging, host = transport._Staging(), torch.device("cpu")
    first = staging.take(1 << 20, torch.float32, host)
    second = staging.take(1 << 20, torch.float32, host)
    pointers = {first.data_ptr(), second.data_ptr()}
    for tensor in (first, second, torch.empty(1 << 20), torch.empty(8)):
        staging.give(tensor)
    assert len(staging._free) == 2
    smaller = staging.take(1 << 20, torch.bfloat16, host)
    tiny = staging.take(8, torch.float32, host)
    again = staging.take(1 << 20, torch.float32, host)
    fresh = staging.take(1 << 20, torch.float32, host)
    assert smaller.dtype == torch.bfloat16 and smaller.numel() == 1 << 20 and len(staging._free) == 0
    assert len({t.data_ptr() for t in (smaller, tiny, again, fresh)}) == 4
    assert pointers & {smaller.data_ptr(), again.data_ptr()}


def test_one_process_without_a_launcher():
    flat = torch.arange(6.0)
    slice_, work = comm.reduce_scatter(flat, [0, 6], op="mean", out_dtype=torch.float64, async_op=True)
    work.wait()
    assert slice_.dtype == torch.float64 and slice_.tolist() == flat.tolist()
    comm.all_reduce(flat, op="max").wait()
    comm.all_gather_into(flat, [0, 6])
    comm.broadcast(flat, 0)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: comm.all_reduce(torch.ones(1), op="avg"), "op='avg' must be one of 'sum', 'mean', 'max', 'min'"),
        (lambda: comm.all_reduce(torch.ones(1, dtype=torch.int64), op="mean"), "mean.*floating dtype"),
        (lambda: comm.all_reduce(torch.ones(1).to(torch.float8_e5m2)), "cannot be reduced"),
        (lambda: comm.reduce_scatter(torch.ones(4), [0, 4], op="max"), "'sum', 'mean'"),
        (lambda: comm.reduce_scatter(torch.ones(4), [0, 2, 4]), r"bounds=\[0, 2, 4\] must be 2 ascending"),
        (lambda: comm.reduce_scatter(torch.ones(4), [0, 5]), r"within 0\.\.4"),
        (lambda: comm.reduce_scatter(torch.ones(4), [0, 4], out=torch.ones(3)), r"out must be .* \(4,\)"),
        (
            lambda: comm.reduce_scatter(torch.ones(4), [0, 4], out=torch.ones(4), out_dtype=torch.float64),
            "give one of the two",
        ),
        (lambda: comm.all_gather_into(torch.ones(2, 2), [0, 4]), "1-D and contiguous"),
        (lambda: comm.broadcast(torch.ones(1), 1), r"src=1 must be a rank within the group, 0 to 0"),
        (lambda: comm.even_bounds(7, 2), "pad the buffer"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
