"""Parameters reached in any way torch allows give the reference's gradients: no hook needs a module's forward."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness import CaseFailure, run_cases
from tests.harness.training import Recipe, check_parity, fit, make_plugin

pytestmark = pytest.mark.fast
WIDTH, LENGTH, ROWS = 12, 6, 12


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()


class Functional(nn.Module):
    """Weights used by multiplication, F.linear on another module's transposed weight, einsum and MultiheadAttention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = RMSNorm(), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        x = x + F.linear(x, self.linear.weight.t())
        x = torch.einsum("bsd,de->bse", x, self.mix)
        return self.attention(x, x, x, need_weights=False)[0] + self.linear(x)


class Checkpointed(Functional):
    """The block is run twice, recomputed each time: reentrant checkpointing brings its gradients in two portions."""

    use_reentrant = False

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return x


class Reentrant(Checkpointed):
    use_reentrant = True


class Branching(Functional):
    """Each batch takes another path, and one parameter is used again outside its module."""

    def forward(self, x):
        if x[0, 0, 0] > 0:
            return super().forward(x)
        return self.norm(x) @ self.mix * self.norm.weight


class TwoOutputs(Functional):
    """A loss that needs only a part of what was computed."""

    def forward(self, x):
        self.unneeded = self.linear(x)
        return self.norm(x) @ self.mix


MODELS = {cls.__name__: cls for cls in (Functional, Checkpointed, Reentrant, Branching, TwoOutputs)}


def windows():
    generator = torch.Generator().manual_seed(5)
    return [
        [
            {
                # Reentrant checkpointing needs an input that requires gradients.
                "x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator).requires_grad_(),
                "y": torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
            }
        ]
        for _ in range(3)
    ]


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def recipe_of(name):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return Recipe(MODELS[name], sgd, windows, loss)


def train_any(rank, world_size, name, plugin, **plugin_args):
    return fit(rank, world_size, recipe_of(name), make_plugin(plugin, **plugin_args), read_grads=(0, 2))


# torch's DDP needs every parameter each time unless told, and takes each only once a step; FSDP2 needs equal ones on
# all ranks.
NOT_PROMISED = {("ddp", name) for name in ("Reentrant", "Checkpointed", "Branching", "TwoOutputs")} | {("fsdp", "Branching")}
VARIANTS = {
    f"{name}-{plugin}{'-' if args else ''}{'-'.join(args)}": {"name": name, "plugin": plugin, **args}
    for name, (plugin, args) in product(
        MODELS,
        [
            ("zero1", {}),
            ("zero2", {}),
            ("zero1", {"overlap_communication": False}),
            ("zero1", {"overlap_allgather": True}),
            ("zero2", {"overlap_allgather": True, "reduce_bucket_size_in_m": 64 / 2**20}),
            ("fsdp", {}),
            ("ddp", {}),
        ],
    )
    if (plugin, name) not in NOT_PROMISED
}
_results: dict = {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_c35_any_code(variant):
    if not _results:
        _results.update(run_cases(2, train_any, VARIANTS))
    results = _results[variant]
    assert not isinstance(results, CaseFailure), str(results)
    check_parity(results, recipe_of(VARIANTS[variant]["name"]).reference(parts=2))
