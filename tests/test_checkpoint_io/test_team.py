"""One error on all ranks, in time: the writer's, a reader's, and the one of ranks that did not come."""

import errno
import os
import time

import pytest
import torch

from colossalai.checkpoint_io import CheckpointIO, writing
from colossalai.utils.safetensors import SafetensorsFile
from tests.harness import run_workers
from tests.harness.fresh import run_fresh
from tests.test_checkpoint_io.common import Trainer


def error_of(call):
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error), time.monotonic() - begun
    return [], "", time.monotonic() - begun


def full_disk(rank, world_size, plugin, folder, after, shard):
    """The first rank's disk is full after some writes; then it has space again."""
    run = Trainer(plugin, "LLA")
    run.step(0, rank, world_size)
    path = f"{folder}/model" if shard else f"{folder}/model.safetensors"
    options = dict(shard=shard, size_per_shard=0.01, use_safetensors=True)
    run.io.save_model(run.model, path, **options)
    before = run.digest()
    run.step(1, rank, world_size)
    real, left = SafetensorsFile._write, [after]

    def write(self, data, offset):
        left[0] -= 1
        if left[0] < 0 and rank == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        real(self, data, offset)

    SafetensorsFile._write = write
    try:
        failed = error_of(lambda: run.io.save_model(run.model, path, **options))
    finally:
        SafetensorsFile._write = real
    after_failure = Trainer(plugin, "LLA", seed=3)
    after_failure.io.load_model(after_failure.model, path)
    run.io.save_model(run.model, path, **options)
    again = Trainer(plugin, "LLA", seed=3)
    again.io.load_model(again.model, path)
    return failed, before == after_failure.digest(), run.digest() == again.digest()


@pytest.mark.parametrize("plugin", ["zero1", "fsdp"])
@pytest.mark.parametrize("after, shard", [(0, True), (7, True), (40, True), (5, False)])
def test_a_full_disk_is_told_to_all_ranks_and_costs_nothing(plugin, after, shard, tmp_path):
    found = run_workers(2, full_disk, plugin=plugin, folder=str(tmp_path), after=after, shard=shard)
    for (kinds, message, _), old_is_whole, new_is_whole in found:
        assert "RuntimeError" in kinds and "No space left" in message
        assert old_is_whole and new_is_whole
    assert found[0][0][:2] == found[1][0][:2]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def one_rank_fails(rank, world_size, folder):
    """The second rank cannot read what the others can; where a path is no directory."""
    run = Trainer("zero1")
    run.io.save_model(run.model, f"{folder}/x.pt")
    run.io.save_model(run.model, f"{folder}/d", shard=True)
    real = writing.read_torch
    from colossalai.checkpoint_io import reading

    def read(path, *args, **kwargs):
        if rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)

    reading.read_torch = read
    try:
        unreadable = error_of(lambda: run.io.load_model(run.model, f"{folder}/x.pt"))
    finally:
        reading.read_torch = real
    no_parent = error_of(lambda: run.io.save_optimizer(run.optimizer, f"{folder}/x.pt/optimizer", shard=True))
    missing = error_of(lambda: run.io.load_model(run.model, f"{folder}/none"))
    run.io.load_model(run.model, f"{folder}/x.pt")
    return unreadable, no_parent, missing


def test_an_error_of_one_rank_is_that_of_all(tmp_path):
    found = run_workers(3, one_rank_fails, folder=str(tmp_path))
    for unreadable, no_parent, missing in found:
        assert "RuntimeError" in unreadable[0] and "rank 1" in unreadable[1] and "x.pt" in unreadable[1]
        assert "RuntimeError" in no_parent[0] and "x.pt" in no_parent[1]
        assert "RuntimeError" in missing[0] and "none does not exist" in missing[1]
    assert len({str([error[:2] for error in rank]) for rank in found}) == 1


def calls_that_differ(rank, world_size, folder, seconds):
    os.environ["COLOSSALAI_TIMEOUT"] = str(seconds)
    try:
        run = Trainer("zero2")
        other = error_of(lambda: run.io.save_model(run.model, f"{folder}/{rank}.pt"))
        kind = error_of(lambda: run.io.save_model(run.model, folder) if rank else run.io.save_optimizer(run.optimizer, folder))
        time.sleep(0 if rank == 0 else seconds + 2)  # who comes after the call has failed is told the same
        late = error_of(lambda: run.io.save_model(run.model, f"{folder}/x.pt"))
        run.io.save_model(run.model, f"{folder}/x.pt")
        return other, kind, late
    finally:
        del os.environ["COLOSSALAI_TIMEOUT"]


def test_calls_that_differ_or_of_the_first_rank_only(tmp_path):
    found = run_workers(2, calls_that_differ, folder=str(tmp_path), seconds=3)
    for other, kind, late in found:
        assert "DisagreementError" in other[0] and "checkpoint" in other[1] and "0.pt" in other[1] and "1.pt" in other[1]
        assert "save_model" in kind[1] and "save_optimizer" in kind[1]
        assert "DisagreementError" in late[0] and "every rank must call it" in late[1] and late[2] < 20


def alone_in_a_world(rank, world_size, folder):
    """Without a plugin every process is for itself, in a world too."""
    from colossalai.checkpoint_io import GeneralCheckpointIO

    io, model = GeneralCheckpointIO(), torch.nn.Linear(3, 3)
    if rank == 1:
        io.save_model(model, f"{folder}/one.pt")
        io.load_model(model, f"{folder}/one.pt")
    io.save_model(torch.nn.Linear(64, 64), f"{folder}/of{rank}", shard=True, size_per_shard=0.001)
    io.load_model(torch.nn.Linear(64, 64), f"{folder}/of{rank}")


def test_without_a_plugin_each_process_saves_for_itself(tmp_path):
    run_workers(2, alone_in_a_world, folder=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["of0", "of1", "one.pt"]
    assert CheckpointIO().team.size == 1


def save_in_a_fake_world(folder):
    from colossalai import comm

    with comm.fake_world(0, 4):
        run = Trainer("zero1")
        run.io.save_model(run.model, f"{folder}/model", shard=True)
        run.io.save_optimizer(run.optimizer, f"{folder}/optimizer")
        run.io.save_training_state(f"{folder}/state")
        assert run.io.load_training_state(f"{folder}/state") == {}
        assert run.io.load_model(run.model, f"{folder}/none") is run.model
    return os.listdir(folder)


def test_in_a_fake_world_nothing_is_read_or_written(tmp_path):
    """The script of a dry run is the training script."""
    assert run_fresh([(save_in_a_fake_world, {"folder": str(tmp_path)}, {})]) == [[]]
