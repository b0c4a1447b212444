"""StatefulDataLoader over map-style datasets: resuming, epochs, randomness."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from colossalai.booster.data import StatefulDistributedSampler, prepare_dataloader
from colossalai.utils.errors import CheckpointError, ConfigError


class Noisy(Dataset):
    """Sample i with a draw from each generator and the worker that made it."""

    def __init__(self, length=40):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        info = get_worker_info()
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return index, draws, (info.id, info.seed) if info else (0, 0)


def as_lists(samples):
    return [sample[0] for sample in samples], [sample[1] for sample in samples]


def loaders(replicas, dataset=None, batch_size=4, **kwargs):
    kwargs = {"shuffle": True, "collate_fn": list} | kwargs
    return [
        prepare_dataloader(Noisy() if dataset is None else dataset, batch_size, replicas, rank, **kwargs)
        for rank in range(replicas)
    ]


def global_order(ranks, batches=None):
    """Indices in the order of the epoch, from the batches of all ranks: they are dealt like cards."""
    order = []
    for step in zip(*ranks, strict=False):
        order += [sample[0] for turn in zip(*step, strict=False) for sample in turn]
        if batches is not None and len(order) >= batches:
            break
    return order


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("replicas", [2, 1, 4])
def test_c82_resume_in_mid_epoch_keeps_the_order_on_any_number_of_ranks(workers, replicas):
    whole = loaders(2)
    epochs = [global_order(whole) for _ in range(3)]
    assert len({tuple(order) for order in epochs}) == 3
    assert all(sorted(order) == list(range(40)) for order in epochs)

    stopped = loaders(2, num_workers=workers)
    for loader in stopped:
        list(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in stopped]
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["consumed"]) == (1, 24)

    resumed = loaders(replicas, num_workers=workers)
    for loader in resumed:
        loader.load_state_dict(states[0])
        loader.sampler.set_epoch(1)  # what a training loop does at the top of its epoch
    assert global_order(resumed) == epochs[1][24:]
    for loader in resumed:
        loader.sampler.set_epoch(2)
    assert global_order(resumed) == epochs[2]


def test_c82_batch_size_may_change_on_resume():
    (loader,) = loaders(1)
    whole = global_order([loader])
    (loader,) = loaders(1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    (other,) = loaders(1, batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert global_order([other]) == whole[8:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_resumed_draws_are_those_of_the_uninterrupted_run(options):
    (loader,) = loaders(1)
    whole = [as_lists(batch) for _ in range(2) for batch in loader]

    (loader,) = loaders(1, **options)
    seen = []
    for batch in loader:
        seen.append(as_lists(batch))
    iterator = iter(loader)
    seen += [as_lists(next(iterator)) for _ in range(3)]
    state = loader.state_dict()
    (resumed,) = loaders(1, **options)
    resumed.load_state_dict(state)
    seen += [as_lists(batch) for batch in resumed]
    assert seen == whole


def test_draws_differ_over_workers_ranks_and_epochs():
    draws, seeds = [], set()
    for loader in loaders(2, num_workers=2, shuffle=False):
        for _ in range(2):
            for batch in loader:
                draws += [sample[1] for sample in batch]
                seeds |= {sample[2] for sample in batch}
    assert len(draws) == len(set(draws)) == 80
    assert len(seeds) == len({seed for _, seed in seeds}) == 8  # 2 workers x 2 ranks x 2 epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainers_generators_are_left_alone(workers):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    (loader,) = loaders(1, num_workers=workers)
    list(loader)
    next(iter(loader))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_only_delivered_batches_count():
    (loader,) = loaders(1, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for count in range(3):
        assert loader.state_dict()["consumed"] == 4 * count
        assert len(iterator) == 10
        next(iterator)


def test_an_epoch_ends_breaks_and_begins_anew():
    (loader,) = loaders(1)
    first = global_order([loader])
    assert (loader.epoch, loader.sampler.epoch) == (1, 1)
    assert loader.state_dict()["consumed"] == 0
    second = global_order([loader], batches=8)  # breaks out
    assert loader.epoch == 1
    again = global_order([loader])
    assert again[:8] == second and sorted(again) == sorted(first)
    loader.set_epoch(0)
    assert global_order([loader]) == first
    loader.sampler.set_epoch(0)
    assert global_order([loader]) == first


def test_a_counted_pass_is_followed_by_the_next_epoch_unless_one_is_chosen():
    def counted(loader):
        iterator = iter(loader)
        return [sample[0] for _ in range(len(loader)) for sample in next(iterator)]

    (loader,) = loaders(1)
    epochs = [global_order([loader]) for _ in range(3)]
    (loader,) = loaders(1)
    assert [counted(loader) for _ in range(3)] == epochs
    for choose in (loader.set_epoch, loader.sampler.set_epoch):
        for _ in range(2):
            choose(1)
            assert counted(loader) == epochs[1]


def test_state_after_the_last_batch_leaves_nothing_of_the_epoch():
    (loader,) = loaders(1)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    (resumed,) = loaders(1)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert (resumed.epoch, len(resumed), len(list(resumed))) == (1, 10, 10)


@pytest.mark.parametrize("drop_last, lengths", [(True, [4, 4]), (False, [4, 4, 4])])
def test_drop_last_reaches_sampler_and_loader(drop_last, lengths):
    ranks = loaders(2, Noisy(23), drop_last=drop_last, shuffle=False)
    for loader in ranks:
        assert loader.sampler.drop_last == drop_last
        assert len(loader) == len(iter(loader)) == len(lengths)
        assert [len(batch) for batch in loader] == lengths
    assert len({sample[0] for loader in ranks for batch in loader for sample in batch}) == (16 if drop_last else 23)


def test_seed_shuffles():
    orders = {seed: global_order(loaders(2, seed=seed)) for seed in (1, 2)}
    assert orders[1] != orders[2] and orders[1] == global_order(loaders(2, seed=1))
    theirs = DistributedSampler(range(40), 2, 1, shuffle=True, seed=1)
    assert list(theirs) == [sample[0] for batch in loaders(2, seed=1)[1] for sample in batch]


class Reversed(torch.utils.data.Sampler):
    """A user's class with the least signature upstream asks for."""

    def __init__(self, dataset, num_replicas, rank, shuffle):
        self.own = list(range(len(dataset)))[::-1][rank::num_replicas]

    def __iter__(self):
        return iter(self.own)

    def __len__(self):
        return len(self.own)


def test_custom_sampler_class_is_used_and_resumed_on_the_same_split():
    loader = loaders(2, distributed_sampler_cls=Reversed)[1]
    assert type(loader.sampler) is Reversed and loader.dataset.length == 40
    whole = [as_lists(batch) for batch in loader]
    assert whole[0][0] == [38, 36, 34, 32]
    loader = loaders(2, distributed_sampler_cls=Reversed)[1]
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = loaders(2, distributed_sampler_cls=Reversed)[1]
    resumed.load_state_dict(loader.state_dict())
    assert len(iter(resumed)) == 3
    assert [as_lists(batch) for batch in resumed] == whole[2:]
    assert [as_lists(batch) for batch in resumed][0] != whole[0] and resumed.epoch == 2  # other draws in epoch 1
    with pytest.raises(CheckpointError, match="num_replicas=2, now it is 1.*distributed_sampler_cls"):
        loaders(1, distributed_sampler_cls=Reversed)[0].load_state_dict(loader.state_dict())


def test_torch_sampler_class_gets_seed_and_drop_last():
    loader = loaders(2, Noisy(23), distributed_sampler_cls=DistributedSampler, seed=9, drop_last=True)[0]
    assert (loader.sampler.seed, loader.sampler.drop_last, len(loader.sampler)) == (9, True, 11)
    list(loader)
    assert loader.sampler.epoch == 1


def test_randomness_in_the_users_hands():
    def fixed(_worker):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    (loader,) = loaders(1, num_workers=2, worker_init_fn=fixed)
    first, second = (batch[0][1] for batch, _ in zip(loader, range(2), strict=False))
    assert first == second  # both workers draw what the user seeded
    generator = torch.Generator().manual_seed(3)
    (loader,) = loaders(1, generator=generator)
    assert loader.generator is generator


def test_vectorised_reading_is_kept():
    class Many(Noisy):
        def __getitems__(self, indices):
            return [(index, "many", 0) for index in indices]

    (loader,) = loaders(1, Many())
    assert next(iter(loader))[0][1] == "many"


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"sampler": [0]}, "sampler=.*distributed_sampler_cls"),
        ({"batch_sampler": [[0]]}, "batch_sampler=.*distributed_sampler_cls"),
        ({"in_order": False, "num_workers": 1}, "in_order=False"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"rank": 2}, "rank=2"),
        ({"dataset": iter([1])}, "__getitem__"),
    ],
)
def test_misuse_names_the_argument(kwargs, message):
    arguments = {"dataset": Noisy(), "batch_size": 4, "num_replicas": 2, "rank": 0} | kwargs
    with pytest.raises(ConfigError, match=message):
        prepare_dataloader(**arguments)


def test_unknown_keyword_is_torchs_error():
    with pytest.raises(TypeError, match="no_such_option"):
        prepare_dataloader(Noisy(), 4, 1, 0, no_such_option=1)


def test_state_of_another_kind_is_refused():
    (loader,) = loaders(1)
    with pytest.raises(CheckpointError, match="shuffle"):
        loader.load_state_dict({"epoch": 0, "consumed": 4, "num_replicas": 1, "batch_size": 4, "length": 40})
    assert isinstance(loader.sampler, StatefulDistributedSampler)


def test_workers_end_when_a_pass_is_broken_off():
    (loader,) = loaders(1, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    (worker,) = iterator._batches._workers
    assert worker.is_alive()
    del iterator
    worker.join(timeout=20)
    assert not worker.is_alive()
