import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.checkpoint_io.sharder import StateDictSharder, pack, shard_model_checkpoint, shard_optimizer_checkpoint

pytestmark = pytest.mark.fast

KIB = 256  # float32 elements
MIB = 1024 * KIB


def test_a_new_shard_starts_where_adding_would_exceed_the_limit():
    assert pack([1, 1, 1], 2) == [[0, 1], [2]]
    assert pack([1, 3, 1], 2) == [[0], [1], [2]]
    assert pack([5], 2) == [[0]]
    assert pack([], 2) == []
    assert pack([0, 2, 0, 0.5], 2) == [[0, 1, 2], [3]]


@given(st.lists(st.floats(0, 10), max_size=30), st.floats(0.1, 12))
def test_the_sharder_packs_as_pack_does(sizes, limit):
    sharder, shards = StateDictSharder(limit), []
    for index, size in enumerate(sizes):
        full, _ = sharder._append(index, None, size)
        if full is not None:
            shards.append(list(full))
    if sharder.current_block:
        shards.append(list(sharder.current_block))
    assert shards == pack(sizes, limit)
    assert [index for shard in shards for index in shard] == list(range(len(sizes)))
    for shard in shards:
        assert len(shard) == 1 or sum(sizes[index] for index in shard) <= limit


def test_shards_of_a_state_dict_and_of_optimizer_states():
    state = {"a": torch.zeros(MIB), "b": torch.zeros(MIB), "c": torch.zeros(3 * MIB)}
    shards = list(shard_model_checkpoint(state, 2))
    assert [(list(shard), size) for shard, size in shards] == [(["a", "b"], 2.0), (["c"], 3.0)]
    pinned: dict = {}
    copies = list(shard_model_checkpoint(state, 2, pinned))
    assert copies[0][0]["a"] is pinned["a"] and pinned["a"].data_ptr() != state["a"].data_ptr()
    states = {"state": {0: {"exp_avg": torch.zeros(MIB), "step": torch.tensor(1.0)}, 1: {"exp_avg": torch.zeros(2 * MIB)}}}
    assert [list(shard) for shard, _ in shard_optimizer_checkpoint(states, 2)] == [[0], [1]]
