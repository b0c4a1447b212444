"""A save or a load needs the memory of a shard and a tensor, not of the model."""

import ctypes
import threading
import time

import pytest
import torch
from torch import nn

from tests.harness import run_workers
from tests.test_checkpoint_io.common import Trainer, memory_mib

LAYERS, WIDTH = 16, 1024


def big_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


class Peak:
    """Growth of this process's memory inside the block, MiB."""

    def __enter__(self):
        # What the allocator keeps of freed memory would hide what is taken.
        ctypes.CDLL(None).malloc_trim(0)
        self._stop, self._start = threading.Event(), memory_mib()
        self.mib = 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.is_set():
            self.mib = max(self.mib, memory_mib() - self._start)
            time.sleep(0.0005)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def test_the_measure_sees_what_is_taken():
    with Peak() as peak:
        taken = torch.ones(16 * WIDTH * WIDTH)
        time.sleep(0.01)
        del taken
    assert 60 < peak.mib < 80


def measure(rank, world_size, plugin, folder, use_safetensors):
    run, grown = Trainer(plugin, big_model), {}
    run.optimizer.backward(run.model(torch.zeros(1, WIDTH)).sum())
    run.optimizer.step()
    run.optimizer.zero_grad()
    small = dict(shard=True, size_per_shard=4)
    for _ in range(2):  # the first time the allocator takes what it keeps
        for what, call in (
            (
                "save_model",
                lambda: run.io.save_model(run.model, f"{folder}/m", use_safetensors=use_safetensors, **small),
            ),
            ("save_optimizer", lambda: run.io.save_optimizer(run.optimizer, f"{folder}/o", **small)),
            ("load_model", lambda: run.io.load_model(run.model, f"{folder}/m")),
            ("load_optimizer", lambda: run.io.load_optimizer(run.optimizer, f"{folder}/o")),
        ):
            with Peak() as peak:
                call()
            grown[what] = max(grown.get(what, 0.0), peak.mib)
    return grown


@pytest.mark.parametrize("use_safetensors", [True, False])
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_c68_extra_memory_is_bounded_by_shard_and_tensor(plugin, use_safetensors, tmp_path):
    """64 MiB of weights and 128 MiB of states on two ranks, shards of 4 MiB."""
    found = run_workers(2, measure, timeout=120, plugin=plugin, folder=str(tmp_path), use_safetensors=use_safetensors)
    print({what: [round(rank[what], 1) for rank in found] for what in found[0]})
    for rank in found:
        assert all(mib < 24 for mib in rank.values()), rank
