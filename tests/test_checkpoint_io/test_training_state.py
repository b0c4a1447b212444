"""Random numbers, the place in the data, schedulers: what a resumed run goes on with."""

import random

import numpy as np
import pytest
import torch

from colossalai.checkpoint_io import GeneralCheckpointIO
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError, ConfigError
from tests.harness import run_workers
from tests.test_checkpoint_io.common import Trainer


def draws():
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist(), np.random.randn()]


def save_and_draw(rank, world_size, path):
    run = Trainer("zero1")
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    draws()
    extra = {"step": np.int64(7), "best": 0.5, "history": [1, (2, "x")], "average": torch.ones(2)}
    run.io.save_training_state(path, extra=extra if rank == 0 else None)
    wanted = draws()
    draws()
    found = run.io.load_training_state(path)
    return wanted, draws(), found


def load_and_draw(rank, world_size, path):
    run = Trainer("ddp")
    run.io.load_training_state(path)
    return draws()


def test_random_numbers_of_every_rank_go_on(tmp_path):
    path = str(tmp_path / "state.pt")
    results = run_workers(2, save_and_draw, path=path)
    for wanted, found, extra in results:
        assert wanted == found
        assert extra["step"] == 7 and type(extra["step"]) is int and extra["history"] == [1, (2, "x")]
        assert extra["average"].tolist() == [1.0, 1.0]
    assert results[0][0] != results[1][0], "each rank has its own"
    content = torch.load(path, weights_only=True)
    assert content["world_size"] == 2 and len(content["ranks"]) == 2
    on_three = run_workers(3, load_and_draw, path=path)
    assert on_three == [results[0][0], results[1][0], results[0][0]], "a new rank takes the first one's"


def read_data(rank, world_size, path, before, after):
    """Indices of some batches, a save, and the indices after it; with ``before`` 0 the state is loaded instead."""
    run = Trainer("zero1")
    data = torch.utils.data.TensorDataset(torch.arange(40))
    loader = run.plugin.prepare_dataloader(data, batch_size=2, shuffle=True, seed=3)
    if before == 0:
        run.io.load_training_state(path, loader)
    batches = iter(loader)
    first = [next(batches)[0].tolist() for _ in range(before)]
    if before:
        run.io.save_training_state(path, loader)
    return first, [batch[0].tolist() for batch, _ in zip(batches, range(after))]


def test_the_data_goes_on_where_it_was(tmp_path):
    path = str(tmp_path / "state.pt")
    saved = run_workers(2, read_data, path=path, before=3, after=4)
    again = run_workers(2, read_data, path=path, before=0, after=4)
    assert [rank[1] for rank in again] == [rank[1] for rank in saved]
    alone = run_workers(1, read_data, path=path, before=0, after=8)[0][1]
    assert sorted(sum(alone, [])) == sorted(sum((sum(rank[1], []) for rank in saved), []))


@pytest.fixture
def io():
    return GeneralCheckpointIO()


def test_misuse_is_named(io, tmp_path):
    loader = torch.utils.data.DataLoader(range(4))
    with pytest.raises(ConfigError, match="prepare_dataloader"):
        io.save_training_state(tmp_path / "x.pt", loader)
    io.save_training_state(tmp_path / "x.pt")

    class Loader:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    with pytest.raises(CheckpointError, match="without a dataloader"):
        io.load_training_state(tmp_path / "x.pt", Loader())
    torch.save({}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="y.pt"):
        io.load_training_state(tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="z.pt"):
        io.load_training_state(tmp_path / "z.pt")
    with pytest.raises(CheckpointError, match="object"):
        io.save_training_state(tmp_path / "x.pt", extra={"what": object()})
    assert io.load_training_state(tmp_path / "x.pt") == {}, "the failed save left the old file"


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 8]),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
])  # fmt: skip
def test_c75_schedulers_of_torch_go_on(io, make, tmp_path):
    def fresh():
        model = TINY_MODELS["MLP"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, make(optimizer)

    def go(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = fresh()
    go(optimizer, scheduler, 7)
    io.save_lr_scheduler(scheduler, tmp_path / "scheduler.pt")
    io.save_optimizer(optimizer, tmp_path / "optimizer.pt")
    wanted = go(optimizer, scheduler, 8)
    optimizer, scheduler = fresh()
    io.load_optimizer(optimizer, tmp_path / "optimizer.pt")
    io.load_lr_scheduler(scheduler, tmp_path / "scheduler.pt")
    assert go(optimizer, scheduler, 8) == wanted
