"""ZeRO takes whatever parameters a model has: tiny groups, frozen, tied, unused ones, odd strides and buffers."""

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import (
    ADAM_EPS,
    Case,
    Recipe,
    check_close,
    check_parity,
    fit,
    make_plugin,
    mlp_windows,
    reference,
    train,
    whole_params,
)

STAGES = pytest.mark.parametrize("stage", [1, 2])
MLP, LLA = TINY_MODELS["MLP"], TINY_MODELS["LLA"]


def group_per_tensor(model):
    groups = [
        {"params": [p], "lr": 0.01 if p.dim() == 1 else 0.1, "weight_decay": 0.0 if p.dim() == 1 else 0.1}
        for p in model.parameters()
    ]
    return torch.optim.AdamW(groups, eps=ADAM_EPS)


def sgd(model, lr=0.1):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)


def decaying(model):
    """Weight decay tells a gradient of zero from none."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, eps=ADAM_EPS)


def frozen_mlp():
    model = MLP.build()
    model[0].requires_grad_(False)
    return model


def frozen_group(model):
    """A group of its own for the frozen layer, and one that is empty, before the one that is trained."""
    parts = [list(model[0].parameters()), [], list(model[2].parameters())]
    groups = [{"params": part, "lr": lr} for part, lr in zip(parts, (0.3, 0.2, 0.1), strict=True)]
    return torch.optim.SGD(groups, momentum=0.9)


def last_layer_only(model):
    """The first layer requires gradients, which nobody uses."""
    return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)


class WithUnused(nn.Module):
    """An MLP and a Linear(5, 5) that no forward reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.unused = MLP.build(), nn.Linear(5, 5)

    def forward(self, x):
        return self.net(x)


class OnlyOnSomeRanks(WithUnused):
    """The extra Linear is used where a batch says so: on rank 0 of 2."""

    def forward(self, x, use):
        y = self.net(x)
        return self.unused(y) if use[0] else y


def mixed_use_windows():
    windows = mlp_windows()
    for (batch,) in windows:
        batch["use"] = torch.arange(len(batch["x"])) < len(batch["x"]) // 2
    return windows


class Quantised(nn.Module):
    """A frozen int8 parameter, a bool buffer, and weights in two float dtypes."""

    def __init__(self):
        super().__init__()
        self.net = MLP.build()
        self.codes = nn.Parameter(torch.arange(-10, 10, dtype=torch.int8).view(5, 4), requires_grad=False)
        self.table = nn.Parameter(torch.linspace(-1, 1, 4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))

    def forward(self, x):
        return self.net(x) * self.mask + (self.codes * self.table).sum(dim=1) / 10


class ConvNet(nn.Module):
    """Convolutions kept channels_last, BatchNorm with its counters, a scalar parameter and an integer buffer."""

    def __init__(self, gain_shape=(), memory_format=torch.channels_last):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.gain = nn.Parameter(torch.full(gain_shape, 1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(4, 5)
        self.body.to(memory_format=memory_format)

    def forward(self, x):
        self.calls += 1
        image = x[:, :3, None, None] * torch.linspace(-1, 1, 36).view(1, 1, 6, 6)
        return self.head(self.body(image.contiguous(memory_format=torch.channels_last)).mean((2, 3)) * self.gain)


def mse(model, batch):
    inputs = [batch[key] for key in batch if key != "y"]
    return nn.functional.mse_loss(model(*inputs).float(), batch["y"])


RECIPES = {
    "groups": Recipe(MLP.build, group_per_tensor, mlp_windows, MLP.loss),
    "frozen": Recipe(frozen_mlp, sgd, mlp_windows, MLP.loss),
    "frozen group": Recipe(frozen_mlp, frozen_group, mlp_windows, MLP.loss),
    "partial": Recipe(MLP.build, last_layer_only, mlp_windows, MLP.loss),
    "unused": Recipe(WithUnused, decaying, mlp_windows, mse),
    "one_rank": Recipe(OnlyOnSomeRanks, decaying, mixed_use_windows, mse),
    "quantised": Recipe(Quantised, sgd, mlp_windows, mse),
    "conv": Recipe(ConvNet, sgd, mlp_windows, mse),
    "plain conv": Recipe(lambda: ConvNet((1,), torch.contiguous_format), sgd, mlp_windows, mse),
}


def train_recipe(rank, world_size, name, plugin, read_grads=(0, 2), same_data=False, **plugin_args):
    return fit(rank, world_size, RECIPES[name], make_plugin(plugin, **plugin_args), read_grads=read_grads, same_data=same_data)


@pytest.mark.fast
@STAGES
def test_c16_groups_smaller_than_the_number_of_ranks(stage):
    """4 ranks, one group for each tensor, the smallest with 5 elements; each group's lr and weight decay count."""
    results = run_workers(4, train_recipe, name="groups", plugin=f"zero{stage}")
    check_parity(results, RECIPES["groups"].reference())


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
@pytest.mark.parametrize("recipe", ["frozen", "frozen group"])
def test_c18_frozen_parameters_stay_bitwise(plugin, recipe):
    results = run_workers(2, train_recipe, name=recipe, plugin=plugin)
    check_parity(results, RECIPES[recipe].reference())
    start = frozen_mlp().state_dict()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(results[0]["params"][name], start[name])


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_parameters_outside_the_optimizer_are_left_alone(plugin):
    results = run_workers(2, train_recipe, name="partial", plugin=plugin, read_grads=())
    wanted = RECIPES["partial"].reference()
    check_close("parameters", results[0]["params"], wanted.params, 1e-5)


def start_apart(rank, world_size, plugin):
    """Every rank builds other weights and buffers; the first rank's must win, frozen ones included."""
    from colossalai.booster import Booster

    model = nn.Sequential(MLP.build(seed=rank), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(float(rank))
    model[0][0].weight.requires_grad_(False)
    booster = Booster(plugin=make_plugin(plugin))
    model, optimizer, *_ = booster.boost(model, sgd(model))
    booster.backward(model(MLP.batch(0)["x"]).square().mean(), optimizer)
    optimizer.step()
    return {name: value.clone() for name, value in model.unwrap().state_dict().items()}


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2"])
def test_all_ranks_start_from_the_first_ones_weights(plugin):
    model = nn.Sequential(MLP.build(seed=0), nn.BatchNorm1d(5))
    model[0][0].weight.requires_grad_(False)
    optimizer = sgd(model)
    model(MLP.batch(0)["x"]).square().mean().backward()
    optimizer.step()
    for state in run_workers(2, start_apart, plugin=plugin):
        check_close("state", state, model.state_dict(), 1e-5)


def half_frozen_llama(seed=0):
    model = LLA.build(seed)
    model.requires_grad_(False)
    for layer in model.model.layers[2:]:
        layer.requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


def llama_windows():
    return [[LLA.batch(step)] for step in range(3)]


def train_loaded_llama(rank, world_size, stage, checkpoint):
    """Boost a model with other weights, then load the right ones into the boosted model."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = half_frozen_llama(seed=1)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    booster.load_model(model, checkpoint)
    for (batch,) in llama_windows():
        booster.backward(LLA.loss(model, LLA.part(batch, rank, world_size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model) if rank == 0 else None


@STAGES
def test_c18_load_model_after_boost_with_frozen_layers_and_checkpointing(stage, tmp_path):
    checkpoint = tmp_path / "model.bin"
    torch.save(half_frozen_llama().state_dict(), checkpoint)
    params = run_workers(2, train_loaded_llama, stage=stage, checkpoint=str(checkpoint))[0]
    wanted = Recipe(half_frozen_llama, sgd, llama_windows, LLA.loss).reference()
    check_close("parameters", params, wanted.params, 1e-5)
    start = dict(half_frozen_llama().named_parameters())
    frozen = [name for name, p in start.items() if not p.requires_grad]
    assert len(frozen) == 21 and all(torch.equal(params[name], start[name]) for name in frozen)


@STAGES
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_c32_tied_weight_cut_unevenly_is_updated_on_every_rank(stage, optimizer):
    """3 ranks share the 101 x 32 embedding of GPT; rows that got a gradient have all moved, each once."""
    case = Case(plugin=f"zero{stage}", model="GPT", optimizer=optimizer, rows=12, read_grads=(0, 1, 2))
    results = run_workers(3, train, case=case)
    wanted = reference(case)
    check_parity(results, wanted)
    name = "transformer.wte.weight"
    moved = (results[0]["params"][name] != dict(TINY_MODELS["GPT"].build().named_parameters())[name]).any(dim=1)
    met = sum(grads[name].abs().sum(dim=1) for grads in wanted.grads) > 0
    assert met.sum() > 90 and bool(moved[met].all())


@pytest.mark.fast
@STAGES
@pytest.mark.parametrize("name", ["unused", "one_rank"])
def test_c34_zero_needs_no_gradient_of_every_parameter(stage, name):
    """A layer that no rank uses keeps its weights and has no gradient; one used on rank 0 gets the mean with zero."""
    results = run_workers(2, train_recipe, name=name, plugin=f"zero{stage}")
    check_parity(results, RECIPES[name].reference(parts=2))
    assert ("unused.weight" in results[0]["grads"][0]) == (name == "one_rank")


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_buffers_strides_and_scalars(plugin):
    """Every rank sees the same data, so that BatchNorm's statistics are those of one process."""
    recipe = "plain conv" if plugin == "fsdp" else "conv"  # FSDP2 itself refuses scalar and strided parameters
    results = run_workers(2, keep_strides, plugin=plugin, recipe=recipe)
    wanted = RECIPES[recipe].reference()
    reference_model = RECIPES[recipe].build()
    for params, strides, buffers in results:
        check_close("parameters", params, wanted.params, 1e-5)
        assert buffers["calls"].item() == 3 and buffers["calls"].dtype == torch.int64
        assert buffers["body.1.num_batches_tracked"].item() == 3
        if plugin != "fsdp":  # FSDP2 keeps its shards in its own order
            assert strides == {name: p.stride() for name, p in reference_model.named_parameters()}


def keep_strides(rank, world_size, plugin, recipe):
    from colossalai.booster import Booster

    booster, recipe = Booster(plugin=make_plugin(plugin)), RECIPES[recipe]
    model = recipe.build()
    model, optimizer, *_ = booster.boost(model, recipe.optimizer(model))
    for (batch,) in recipe.windows():
        booster.backward(recipe.loss(model, batch), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    inner = model.unwrap()
    buffers = {name: buffer.detach().clone() for name, buffer in inner.named_buffers()}
    return whole_params(model), {name: p.stride() for name, p in inner.named_parameters()}, buffers


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2"])
def test_integer_parameters_and_bool_buffers(plugin):
    results = run_workers(2, train_recipe, name="quantised", plugin=plugin)
    check_parity(results, RECIPES["quantised"].reference())
    assert results[0]["params"]["codes"].dtype == torch.int8


def cast_buffers(rank, world_size):
    """In 16 bits: rotary tables and counters keep their dtype, running statistics follow the weights."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("zero1", precision="bf16"))
    llama, conv = LLA.build(), ConvNet()
    llama, *_ = booster.boost(llama, sgd(llama))
    conv, *_ = booster.boost(conv, sgd(conv))
    found = dict(llama.unwrap().named_buffers()) | dict(conv.unwrap().named_buffers())
    return {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in found.items()}


def test_buffers_keep_their_dtype_under_16_bit_precision():
    dtypes = run_workers(2, cast_buffers)[0]
    assert dtypes["model.rotary_emb.inv_freq"] == "float32"
    assert dtypes["calls"] == dtypes["body.1.num_batches_tracked"] == "int64"
    assert dtypes["body.1.running_mean"] == dtypes["body.1.running_var"] == "bfloat16"
