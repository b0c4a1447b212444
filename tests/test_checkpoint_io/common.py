"""What workers of these tests share."""

import torch

from colossalai.checkpoint_io import CheckpointIO
from colossalai.testing import TINY_MODELS
from tests.harness.training import ADAM_EPS, digest, make_plugin, whole_params

__all__ = ["Trainer", "digest", "memory_mib", "whole_params"]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS)


class Trainer:
    """A model and an optimizer under a plugin, and the reader and writer for them."""

    def __init__(self, plugin, model="MLP", optimizer=adamw, seed=0, **plugin_args):
        self.tiny = TINY_MODELS[model] if isinstance(model, str) else None
        self.plugin = make_plugin(plugin, **plugin_args)
        module = self.tiny.build(seed) if self.tiny is not None else model()
        self.io = CheckpointIO()
        made = optimizer(module)
        self.model, self.optimizer, *_ = self.plugin.configure(module, made)

    def step(self, index, rank, world_size):
        batch = self.tiny.part(self.tiny.batch(index), rank, world_size)
        self.optimizer.backward(self.tiny.loss(self.model, batch))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, indices, rank, world_size):
        for index in indices:
            self.step(index, rank, world_size)

    def digest(self):
        return digest(whole_params(self.model))


def memory_mib():
    """RssAnon + RssShmem of this process: pages of mapped files do not count."""
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return sum(int(rows[key].split()[0]) for key in ("RssAnon", "RssShmem")) / 1024
