"""IterableDatasets: split over ranks and workers without loss, in equal numbers of steps."""

import random
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from colossalai.booster.data import prepare_dataloader
from colossalai.utils.errors import ConfigError


class Ints(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SizedInts(Ints):
    def __len__(self):
        return self.length


class SplitsItself(Ints):
    """The pattern of torch's documentation: each worker yields its own part."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.length)[info.id :: info.num_workers] if info else range(self.length))


class Shuffled(Ints):
    """Order and noise from the default generator; records the epoch it is told."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return ((index, self.epoch, random.random()) for index in order)


def ranks(dataset, replicas=2, batch_size=4, **kwargs):
    return [prepare_dataloader(dataset, batch_size, replicas, rank, collate_fn=list, **kwargs) for rank in range(replicas)]


@pytest.mark.parametrize("dataset", [Ints(23), SplitsItself(23)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_c81_every_sample_once_and_equal_steps(dataset, workers, drop_last):
    batches = [list(loader) for loader in ranks(dataset, num_workers=workers, drop_last=drop_last)]
    seen = [sample for rank in batches for batch in rank for sample in batch]
    assert len(seen) == len(set(seen))
    assert set(seen) == set(range(16 if drop_last else 23))  # drop_last: a step needs 2 x 4 samples
    assert len(batches[0]) == len(batches[1]) == (2 if drop_last else 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_c81_at_most_one_sample_short_of_the_ranks_is_dropped(length, replicas, batch_size, drop_last):
    loaders = ranks(SizedInts(length), replicas, batch_size, drop_last=drop_last)
    batches = [list(loader) for loader in loaders]
    seen = sorted(sample for rank in batches for batch in rank for sample in batch)
    assert seen == list(range(len(seen)))
    assert {len(rank) for rank in batches} == {len(loaders[0])}
    whole = replicas * batch_size
    assert length - len(seen) == (length % whole if drop_last or length % whole < replicas else 0)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_c82_stream_resumes_in_mid_epoch_on_any_number_of_ranks(options):
    def orders(loaders):
        steps = zip(*(list(loader) for loader in loaders), strict=True)
        return [sample for step in steps for turn in zip_longest(*step) for sample in turn if sample is not None]

    loaders = ranks(Shuffled(40))
    epochs = [orders(loaders) for _ in range(3)]
    assert [epoch[0][1] for epoch in epochs] == [0, 1, 2]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(sample[0] for sample in epoch) == list(range(40)) for epoch in epochs)

    loader = ranks(Shuffled(40), **options)[0]
    list(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 16)
    for replicas in (2, 1, 3):
        resumed = ranks(Shuffled(40), replicas, **options)
        for loader in resumed:
            loader.load_state_dict(state)
        assert orders(resumed) == epochs[1][16:]
        assert orders(resumed) == epochs[2]


def test_collate_draws_differ_by_rank_and_the_stream_does_not_notice():
    def collate(samples):
        return random.random(), samples

    loaders = [prepare_dataloader(Shuffled(40), 4, 2, rank, collate_fn=collate) for rank in range(2)]
    batches = [list(loader) for loader in loaders]
    assert len({batch[0] for rank in batches for batch in rank}) == 10
    assert sorted(s[0] for rank in batches for batch in rank for s in batch[1]) == list(range(40))


def test_length_needs_a_length():
    (loader,) = ranks(Ints(10), 1)
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(TypeError, match="no len"):
        len(iter(loader))
    assert loader.dataset.length == 10 and loader.batch_size == 4


@pytest.mark.parametrize("kwargs", [{"shuffle": True}, {"distributed_sampler_cls": object}])
def test_arguments_without_meaning_are_refused(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        prepare_dataloader(Ints(5), 2, 1, 0, **kwargs)
