"""The loaders a plugin gives to two real processes."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin


class Ints(IterableDataset):
    def __iter__(self):
        return iter(range(23))


def stream_of_rank(rank, world_size, workers, drop_last):
    loader = TorchDDPPlugin().prepare_dataloader(Ints(), 4, num_workers=workers, drop_last=drop_last)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_c81_iterable_dataset_on_two_processes(workers, num_workers, drop_last):
    first, second = workers(2).run(stream_of_rank, workers=num_workers, drop_last=drop_last)
    assert len(first) == len(second) == (2 if drop_last else 3)
    seen = sorted(sample for batch in first + second for sample in batch)
    assert seen == list(range(16 if drop_last else 23))


def stopped_and_resumed(rank, world_size, state, batches):
    """Batches of the rest of epoch 1 (up to ``batches``) and of epoch 2, and the state in between."""
    plugin = LowLevelZeroPlugin(precision="fp32")
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(40)), 4, shuffle=True, seed=5)
    if state is not None:
        loader.load_state_dict(state)
    seen, stopped = {1: [], 2: []}, None
    for epoch in (1, 2):
        loader.sampler.set_epoch(epoch)
        for step, (batch,) in enumerate(loader):
            if epoch == 1 and step == batches:
                break
            seen[epoch].append(batch.tolist())
            if epoch == 1:
                stopped = loader.state_dict()
    return seen, stopped


def dealt(ranks):
    return [sample for step in zip(*ranks, strict=False) for turn in zip(*step, strict=False) for sample in turn]


@pytest.mark.parametrize("world_size", [1, 2])
def test_c82_resume_on_two_processes_or_one(workers, world_size):
    whole = workers(2).run(stopped_and_resumed, state=None, batches=99)
    begun = workers(2).run(stopped_and_resumed, state=None, batches=3)
    assert begun[0][1] == begun[1][1]
    rest = workers(world_size).run(stopped_and_resumed, state=begun[0][1], batches=99)
    order = dealt([seen[1] for seen, _ in whole])
    assert sorted(order) == list(range(40))
    assert dealt([seen[1] for seen, _ in begun]) + dealt([seen[1] for seen, _ in rest]) == order
    assert dealt([seen[2] for seen, _ in rest]) == dealt([seen[2] for seen, _ in whole]) != order


def arguments_reach_the_loader(rank, world_size):
    found = []
    for plugin in (TorchDDPPlugin(), TorchFSDPPlugin(), LowLevelZeroPlugin(precision="fp32")):
        loader = plugin.prepare_dataloader(list(range(23)), 4, True, 9, True, False, 0, collate_fn=tuple)
        sampler = loader.sampler
        found.append(
            (sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed, sampler.drop_last, type(next(iter(loader))))
        )
    return found


def test_every_plugin_passes_every_argument_on(workers):
    for rank, found in enumerate(workers(2).run(arguments_reach_the_loader)):
        assert found == [(2, rank, True, 9, True, tuple)] * 3
