"""StatefulDistributedSampler: torch's order, a global position, any number of ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from colossalai.booster.data import StatefulDistributedSampler
from colossalai.utils.errors import CheckpointError, ConfigError


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3))
def test_order_is_torchs(length, replicas, shuffle, drop_last, epoch):
    data = list(range(length))
    for rank in range(replicas):
        args = (data, replicas, rank, shuffle, 7, drop_last)
        ours, theirs = StatefulDistributedSampler(*args), DistributedSampler(*args)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.booleans())
def test_resumed_ranks_deal_the_rest_of_the_order(length, before, after, done, shuffle):
    data = list(range(length))
    old = StatefulDistributedSampler(data, before, 0, shuffle=shuffle, seed=3)
    old.set_epoch(2)
    state = old.state_dict(delivered=done)
    ranks = [StatefulDistributedSampler(data, after, rank, shuffle=shuffle, seed=3) for rank in range(after)]
    for sampler in ranks:
        sampler.load_state_dict(state)
    dealt = [index for turn in zip(*ranks, strict=False) for index in turn]
    rest = old.order().tolist()[done * before :]
    assert dealt[: len(rest)] == rest
    assert len(dealt) - len(rest) < after


def test_seed_and_epoch_change_the_order():
    data = list(range(100))
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (5, 0)):
        sampler = StatefulDistributedSampler(data, 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 3


def test_set_start_index_skips_samples_of_each_rank_until_the_next_epoch():
    sampler = StatefulDistributedSampler(list(range(20)), 2, 1, shuffle=True, seed=1)
    whole = list(sampler)
    sampler.set_start_index(4)
    assert sampler.start_index == 4 and len(sampler) == 6
    assert list(sampler) == whole[4:]
    sampler.set_epoch(0)  # the same epoch: the start stays
    assert list(sampler) == whole[4:]
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10
    with pytest.raises(ConfigError, match="start_index=11"):
        sampler.set_start_index(11)


@pytest.mark.parametrize("change, word", [({"seed": 2}, "seed"), ({"shuffle": False}, "shuffle"), ({"n": 9}, "length")])
def test_state_of_another_order_is_refused(change, word):
    def sampler(n=10, seed=1, shuffle=True):
        return StatefulDistributedSampler(list(range(n)), 2, 0, shuffle=shuffle, seed=seed)

    with pytest.raises(CheckpointError, match=word):
        sampler(**change).load_state_dict(sampler().state_dict())


def test_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        StatefulDistributedSampler([], 2, 0)
