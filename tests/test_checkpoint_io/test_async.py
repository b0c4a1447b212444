"""Asynchronous saves: the weights of the call, whatever happens afterwards; errors at the next call."""

import errno
import threading

import pytest
import torch
from safetensors.torch import load_file

from colossalai.checkpoint_io import GeneralCheckpointIO
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import SafetensorsFile
from tests.harness import run_workers
from tests.test_checkpoint_io.common import Trainer, digest

MLP = TINY_MODELS["MLP"]


def save_both(rank, world_size, plugin, family, folder):
    run = Trainer(plugin, family)
    run.step(0, rank, world_size)
    for use_async in (False, True):
        path = f"{folder}/{'async' if use_async else 'sync'}"
        run.io.save_model(run.model, path, shard=True, size_per_shard=0.05, use_safetensors=True, use_async=use_async)
        run.io.save_model(run.model, f"{path}.safetensors", use_safetensors=True, use_async=use_async)
        if not use_async:
            run.io.save_optimizer(run.optimizer, f"{path}.opt.safetensors", use_async=False)
        else:
            run.io.save_optimizer(run.optimizer, f"{path}.opt.safetensors", use_async=True)
    saved = run.digest()
    run.steps(range(1, 3), rank, world_size)
    run.io._sync_d2h()
    run.io._sync_io()
    return saved, run.digest()


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("family", ["GPT", "MIX"])
def test_the_files_are_those_of_a_plain_save(plugin, family, tmp_path):
    for saved, later in run_workers(2, save_both, plugin=plugin, family=family, folder=str(tmp_path)):
        assert saved != later
    sync, async_ = tmp_path / "sync", tmp_path / "async"
    assert sorted(p.name for p in sync.iterdir()) == sorted(p.name for p in async_.iterdir())
    for file in sync.iterdir():
        assert file.read_bytes() == (async_ / file.name).read_bytes(), file.name
    for kind in (".safetensors", ".opt.safetensors"):
        assert (tmp_path / f"sync{kind}").read_bytes() == (tmp_path / f"async{kind}").read_bytes()


def test_the_call_returns_before_the_files_are_there_and_keeps_the_weights(tmp_path, monkeypatch):
    io, model, gate = GeneralCheckpointIO(), MLP.build(), threading.Event()
    real = SafetensorsFile.close
    monkeypatch.setattr(SafetensorsFile, "close", lambda self: (gate.wait(30), real(self))[1])
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    io.save_model(model, tmp_path / "x.safetensors", use_async=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not (tmp_path / "x.safetensors").exists()
    gate.set()
    io._sync_io()
    assert digest(load_file(tmp_path / "x.safetensors")) == digest(wanted)


def test_a_failed_write_is_raised_once_by_the_next_call(tmp_path, monkeypatch):
    io, model = GeneralCheckpointIO(), MLP.build()
    io.save_model(model, tmp_path / "d", shard=True, use_safetensors=True)

    def fail(self, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "_write", fail)
        io.save_model(model, tmp_path / "d", shard=True, use_async=True)
        with pytest.raises(OSError, match="No space left"):
            io._sync_io()
        io._sync_io()
        io.save_model(model, tmp_path / "d", shard=True, use_async=True)
        with pytest.raises(CheckpointError, match="No space left"):
            io.save_model(model, tmp_path / "d", shard=True, use_async=True)
    io.load_model(model, tmp_path / "d")
    assert [path.name for path in (tmp_path / "d").iterdir() if path.name.startswith(".")] == []
