"""Agreement through the store: equal values pass, anything else is named on all ranks within the limit."""

import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from colossalai import comm
from colossalai.utils.errors import ConfigError, DisagreementError

pytestmark = pytest.mark.fast
# The function of the same name hides the module.
agree_module = sys.modules["colossalai.comm.agree"]


def attempt(*args, **kwargs):
    start = time.monotonic()
    try:
        comm.agree(*args, **kwargs)
    except DisagreementError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def plugin_arguments(rank, world_size):
    differing = attempt("booster", {"plugin": "hybrid", "tp_size": 1 if rank == 0 else 2, "pp_size": 1}, timeout=20)
    # A failed agreement leaves the group and the tag usable.
    again = attempt("booster", {"tp_size": 2}, timeout=20)
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    return differing, again, tensor.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_c11_an_argument_that_differs_is_named_on_all_ranks(workers, world_size):
    for (text, seconds), again, total in workers(world_size).run(plugin_arguments):
        others = "rank 1" if world_size == 2 else "ranks 1, 2"
        assert text == (
            f"agreement 'booster' in world: ranks disagree. tp_size is 1 on rank 0, but 2 on {others}. Give all ranks the same."
        )
        assert seconds < 10 and again[0] == "" and total == world_size


def one_never_comes(rank, world_size, absent):
    # Its own group: the absent rank's count of rounds stays behind, which the next test must not notice.
    group = comm.new_group(range(world_size), name="world")
    if rank == absent:
        return None
    return attempt("save_model", {}, group, timeout=1.5, hint="save_model is collective: call it on all ranks.")


@pytest.mark.parametrize("absent", [0, 1])
def test_c67_a_rank_that_does_not_come_is_named_at_the_limit(workers, absent):
    for rank, result in enumerate(workers(3).run(one_never_comes, absent=absent)):
        if rank != absent:
            text, seconds = result
            assert text == (
                f"agreement 'save_model' in world: rank {absent} of 3 did not arrive within 1.5 s. "
                "All ranks of the group must make this call. save_model is collective: call it on all ranks."
            )
            assert 1 < seconds < 10


def late(rank, world_size, last):
    kept, agree_module._GRACE = agree_module._GRACE, timedelta(seconds=0.2)
    if rank == last:
        time.sleep(2)
    first = attempt("late", {"a": 1}, timeout=1)
    agree_module._GRACE = kept
    comm.barrier()
    return first, attempt("late", {"a": 1}, timeout=20)[0]


@pytest.mark.parametrize("last", [0, 1])
def test_who_comes_too_late_learns_of_it(workers, last):
    results = workers(2).run(late, last=last)
    (text, seconds), again = results[last]
    assert seconds < 1 and again == ""
    if last == 1:
        assert "rank 1 of 2 did not arrive within 1 s" in text
    else:
        assert "rank 1 waited, gave up and left before rank 0 arrived" in text
    assert results[1 - last][0][0].startswith("agreement 'late' in world: rank") and results[1 - last][1] == ""


def values_of_all_kinds(rank, world_size):
    order = {"b": 1, "a": {3, 1, 2}} if rank else {"a": {2, 1, 3}, "b": 1}
    long = "x" * 5000 + str(rank)
    return [
        attempt("kinds", {"config": order, "none": None, "dtype": torch.float16, "nan": float("nan")}),
        attempt("kinds", {"text": long}),
        attempt("kinds", {"only_here": 3} if rank == 1 else {}),
        attempt("kinds", {"kind": 1 if rank else "1"}),
        attempt("kinds", {"x": rank, "y": -rank}),
    ]


def test_values_are_compared_by_content(workers):
    for results in workers(2).run(values_of_all_kinds):
        same, long, missing, kind, both = (text for text, _ in results)
        assert same == ""
        assert "text is 'xxx" in long and long.count("sha1") == 2 and len(long) < 700
        assert "only_here is (not given) on rank 0, but 3 on rank 1" in missing
        assert "kind is '1' on rank 0, but 1 on rank 1" in kind
        assert "x is 0 on rank 0, but 1 on rank 1; y is 0 on rank 0, but -1 on rank 1" in both


def subgroups(rank, world_size):
    first, second = comm.new_group([0, 2], name="even"), comm.new_group([1, 2])
    results = []
    for group in (first, second):
        if comm.is_member(group):
            results.append(attempt("mesh", {"rank": 5}, group)[0])
            results.append(attempt("mesh", {"rank": comm.rank(group)}, group)[0])
    return results


def test_groups_agree_apart(workers):
    zero, one, two = workers(3).run(subgroups)
    even = "agreement 'mesh' in even: ranks disagree. rank is 0 on rank 0, but 1 on rank 2. Give all ranks the same."
    other = "agreement 'mesh' in ranks 1, 2: ranks disagree. rank is 0 on rank 1, but 1 on rank 2. Give all ranks the same."
    assert zero == ["", even] and one == ["", other] and two == ["", even, "", other]


def many_rounds(rank, world_size, folder):
    store = agree_module._default_store()
    comm.barrier()
    comm.all_reduce(torch.ones(1))
    before = store.num_keys()
    comm.all_reduce(torch.ones(1))
    start = time.perf_counter()
    for _ in range(50):
        comm.agree("rounds", {"a": 1})
    seconds = (time.perf_counter() - start) / 50
    comm.all_reduce(torch.ones(1))
    after = store.num_keys()
    comm.all_reduce(torch.ones(1))
    # The same through a file store, which some clusters start from.
    files = dist.FileStore(f"{folder}/store", world_size)
    original, agree_module._default_store = agree_module._default_store, lambda: files
    try:
        texts = [attempt("file", {"a": 1}, timeout=20)[0], attempt("file", {"a": rank}, timeout=20)[0]]
        texts.append("" if rank == 0 else attempt("file", {}, timeout=1)[0])
    finally:
        agree_module._default_store = original
    return after - before, seconds, texts


def test_keys_are_deleted_and_any_store_serves(workers, tmp_path):
    for rank, (kept, seconds, texts) in enumerate(workers(3).run(many_rounds, folder=str(tmp_path))):
        assert kept == 0 and seconds < 0.1
        assert texts[0] == "" and "a is 0 on rank 0, but 1 on rank 1, but 2 on rank 2" in texts[1]
        assert rank == 0 or "rank 0 of 3 did not arrive" in texts[2]


def store_host_ends(rank, world_size):
    group = comm.new_group(range(world_size), name="world")
    port = comm.broadcast_object(None if rank else (host := dist.TCPStore("127.0.0.1", 0, is_master=True)).port)
    original = agree_module._default_store
    if rank == 1:
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        client.set("alive", "1")
        agree_module._default_store = lambda: client
    comm.all_reduce(torch.ones(1))
    if rank == 0:
        del host
    comm.all_reduce(torch.ones(1))
    try:
        return attempt("after", {}, group, timeout=20) if rank == 1 else None
    finally:
        agree_module._default_store = original


def test_a_store_that_is_gone_is_named(workers):
    _, (text, seconds) = workers(2).run(store_host_ends)
    assert text.startswith("agreement 'after' in world: the store is out of reach. The process that hosts it")
    assert seconds < 10


def barriers(rank, world_size):
    group = comm.new_group(range(world_size), name="all")
    time.sleep(0.4 * rank)
    comm.barrier(group)
    passed = time.monotonic()
    if rank == 1:
        return passed, ""
    try:
        comm.barrier(group, timedelta(seconds=1))
    except DisagreementError as error:
        return passed, str(error)


def test_barrier_holds_all_and_names_who_is_missing(workers):
    (first, text), (second, _), (third, other) = workers(3).run(barriers)
    assert max(first, second, third) - min(first, second, third) < 0.3
    assert "'barrier' in all: rank 1 of 3 did not arrive within 1 s" in text and text == other


def mismatched(rank, world_size):
    import os

    os.environ["COLOSSALAI_COMM_CHECK"] = "1"
    texts = []
    try:
        calls = [
            lambda: comm.all_reduce(torch.ones(10 + 2 * rank)),
            lambda: comm.all_reduce(torch.ones(4, dtype=torch.bfloat16 if rank else torch.float32)),
            lambda: comm.all_reduce(torch.ones(4)) if rank else comm.broadcast(torch.ones(4), 0),
            lambda: comm.reduce_scatter(torch.ones(8), [0, 4, 8] if rank else [0, 3, 8]),
        ]
        for call in calls:
            with pytest.raises(DisagreementError) as caught:
                call()
            texts.append(str(caught.value))
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        comm.all_gather_into(tensor, [0, 1, 2])
        comm.all_to_all(comm.all_gather(tensor), 0, 0)
        assert tensor.tolist() == [2, 2]
    finally:
        del os.environ["COLOSSALAI_COMM_CHECK"]
    return texts


def test_check_names_collectives_that_do_not_match(workers):
    for shape, dtype, verb, bounds in workers(2).run(mismatched):
        assert "shape is (10) on rank 0, but (12) on rank 1" in shape
        assert "dtype is 'torch.float32' on rank 0, but 'torch.bfloat16' on rank 1" in dtype
        assert "verb is 'broadcast' on rank 0, but 'all_reduce' on rank 1" in verb
        assert "bounds is [0, 3, 8] on rank 0, but [0, 4, 8] on rank 1" in bounds


def test_alone_nothing_is_waited_for():
    comm.agree("alone", {"a": 1})
    comm.barrier()
    with comm.fake_world(3, 8, fake_tensors=False):
        comm.agree("alone", {"a": 1})
        comm.barrier()


@pytest.mark.parametrize("text", ["soon", "-3", "0", "inf", "nan"])
def test_a_time_limit_that_is_none_is_named(monkeypatch, text):
    monkeypatch.setenv("COLOSSALAI_TIMEOUT", text)
    with pytest.raises(ConfigError, match="COLOSSALAI_TIMEOUT='.*' must be a positive number of seconds"):
        comm.default_timeout()


def test_time_limits(monkeypatch):
    monkeypatch.delenv("COLOSSALAI_TIMEOUT", raising=False)
    assert comm.default_timeout() == timedelta(minutes=30)
    monkeypatch.setenv("COLOSSALAI_TIMEOUT", " 2.5 ")
    assert comm.default_timeout() == timedelta(seconds=2.5)
    with pytest.raises(ConfigError, match="ranks=\\[0, 1\\] but this process runs alone"):
        comm.new_group([0, 1])
    assert comm.new_group([0]) is None and comm.is_member() and comm.backend_name() == ""


def group_limit(rank, world_size):
    """A group's collective ends at the limit it was given, and names it in seconds, not after half an hour."""
    group = comm.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(2.5)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        comm.all_reduce(torch.ones(1), group)
    return time.monotonic() - start


def test_a_collective_ends_at_its_groups_limit(workers):
    seconds, _ = workers(2).run(group_limit)
    assert 0.5 < seconds < 10
