"""Killed at any moment, a save leaves the old checkpoint or the new one, never a mixture."""

import json
import os
import signal
import socket
import time

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import GeneralCheckpointIO, staging
from colossalai.checkpoint_io.file_names import has_index_file
from colossalai.utils.errors import CheckpointError


def begin(folder, value, shards=2):
    new = staging.Staging(folder, "m.index.json")
    for number in range(shards):
        new.path(f"m-{number}.bin").write_text(str(value))
    new.path("m.index.json").write_text(json.dumps([f"m-{number}.bin" for number in range(shards)]))
    return new


def contents(folder):
    found, index = has_index_file(folder)
    return {(folder / name).read_text() for name in json.loads(index.read_text())} if found else set()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_published_files_replace_the_old_ones(tmp_path):
    begin(tmp_path, 1, 3).publish()
    (tmp_path / "single").write_text("x")
    begin(tmp_path, 2).publish(stale=["m-2.bin", "m-0.bin"], renames={"single": "single.old"})
    assert names(tmp_path) == ["m-0.bin", "m-1.bin", "m.index.json", "single.old"]
    assert contents(tmp_path) == {"2"}


def test_what_is_discarded_leaves_nothing(tmp_path):
    begin(tmp_path, 1).publish()
    begin(tmp_path, 2).discard()
    assert contents(tmp_path) == {"1"} and len(names(tmp_path)) == 3


def in_child(body):
    """Run ``body`` in a forked process; returns its id. The child never returns."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(1)
    return child


def publish_until(folder, moves):
    """Publish, and die instead of the rename after ``moves`` of them."""
    left, real = [moves], os.replace

    def replace(source, target):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        real(source, target)

    os.replace = replace
    begin(folder, 2, 3).publish(stale=["m-9.bin"])
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moves", range(6))
def test_killed_at_every_rename(tmp_path, moves):
    begin(tmp_path, 1).publish()
    (tmp_path / "m-9.bin").write_text("1")
    code = os.waitstatus_to_exitcode(os.waitpid(in_child(lambda: publish_until(tmp_path, moves)), 0)[1])
    if moves == 0:  # the journal did not appear: nothing happened
        assert code == 9 and contents(tmp_path) == {"1"}
        begin(tmp_path, 3).discard()
        assert names(tmp_path) == ["m-0.bin", "m-1.bin", "m-9.bin", "m.index.json"], "the dead process's files are swept"
        return
    assert code == (0 if moves == 5 else 9)
    if moves < 5:
        assert not (tmp_path / "m.index.json").exists(), "a reader without the journal finds nothing rather than a mixture"
    assert contents(tmp_path) == {"2"}
    assert names(tmp_path) == ["m-0.bin", "m-1.bin", "m-2.bin", "m.index.json"]


def test_a_single_file_is_whole_or_not_there(tmp_path):
    target = tmp_path / "x.pt"
    target.write_text("old")
    file = staging.SingleFile(target)
    file.path("").write_text("new")
    assert target.read_text() == "old"
    file.publish()
    assert target.read_text() == "new" and names(tmp_path) == ["x.pt"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_only_leftovers_of_dead_processes_are_swept(tmp_path):
    dead = in_child(lambda: None)
    os.waitpid(dead, 0)
    label = staging._label()
    foreign = label.replace(staging._SESSION, "0" * len(staging._SESSION))
    others = {
        "dead": label.replace(f"-{os.getpid()}-", f"-{dead}-"),
        "alive": label.replace(f"-{os.getpid()}-", f"-{os.getppid()}-"),
        "mine": label,
        "same number, other process": foreign,
        "other host": foreign.replace(socket.gethostname(), "elsewhere"),
        "other host, long ago": foreign.replace(socket.gethostname(), "long-ago"),
    }
    files = {what: tmp_path / f".x.pt.tmp-{name}" for what, name in others.items()}
    for file in files.values():
        file.write_text("")
    os.utime(files["other host, long ago"], (0, 0))
    staging.sweep(tmp_path, ".x.pt.tmp-")
    assert {what for what, file in files.items() if file.exists()} == {"alive", "mine", "other host"}


def test_directories_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        staging.SingleFile(tmp_path / "no" / "x.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        staging.SingleFile(tmp_path)
    (tmp_path / ".publish-m.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="publish-m.index.json"):
        staging.recover(tmp_path)


def save_for_ever(folder, use_safetensors):
    io, model = GeneralCheckpointIO(), big_model()
    for step in range(1, 10**6):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(step))
        io.save_model(model, folder, shard=True, size_per_shard=1, use_safetensors=use_safetensors)
        io.save_model(model, f"{folder}.pt")


def big_model():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("use_safetensors", [True, False])
def test_killed_in_the_middle_of_saving(tmp_path, use_safetensors):
    """kill -9 at twelve moments: what is there loads, and all of it is of one step, at least the last one seen."""
    folder, seen, io, model = tmp_path / "model", 0.0, GeneralCheckpointIO(), big_model()
    for attempt in range(12):
        saver = in_child(lambda: save_for_ever(folder, use_safetensors))
        time.sleep(0.6 if attempt == 0 else 0.2 + 0.037 * attempt)
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        values = []
        for path in (folder, f"{folder}.pt"):
            io.load_model(model, path)
            found = {value.item() for p in model.parameters() for value in (p.detach().min(), p.detach().max())}
            assert len(found) == 1, f"tensors of several steps: {found}"
            values.append(found.pop())
        assert values[0] >= 1 and values[1] >= 1
        seen = max(seen, *values)
    assert seen > 1
    io.save_model(model, folder, shard=True, use_safetensors=use_safetensors)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
