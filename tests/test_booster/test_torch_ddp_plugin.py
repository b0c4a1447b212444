"""TorchDDPPlugin: parameters that a step does not touch, autocast, and no_sync through every wrapper."""

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import (
    ADAM_EPS,
    Recipe,
    check_close,
    check_parity,
    fit,
    make_plugin,
    mean_losses,
    mlp_windows,
)

MLP = TINY_MODELS["MLP"]


class WithExtra(nn.Module):
    """An MLP with a Linear(5, 5) that is used where the batch says so, or never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.extra = MLP.build(), nn.Linear(5, 5)

    def forward(self, x, use=None):
        y = self.net(x)
        return self.extra(y) if use is not None and use[0] else y


def used_on_rank_0():
    windows = mlp_windows()
    for (batch,) in windows:
        batch["use"] = torch.arange(len(batch["x"])) < len(batch["x"]) // 2
    return windows


def mse(model, batch):
    return nn.functional.mse_loss(model(batch["x"], batch.get("use")), batch["y"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


RECIPES = {
    "unused": Recipe(WithExtra, sgd, mlp_windows, mse),
    "rank 0 only": Recipe(WithExtra, sgd, used_on_rank_0, mse),
}


def train_extra(rank, world_size, name, **plugin_args):
    return fit(rank, world_size, RECIPES[name], make_plugin("ddp", **plugin_args), read_grads=(2,))


@pytest.mark.fast
@pytest.mark.parametrize("name", RECIPES)
def test_c34_untouched_parameters_with_find_unused_parameters(name):
    results = run_workers(2, train_extra, name=name, find_unused_parameters=True)
    if name == "unused":
        for grads in results[0]["grads"].values():  # torch's DDP may give zeros where one process has None
            assert all(not grads.pop(key).any() for key in [key for key in grads if key.startswith("extra")])
    check_parity(results, RECIPES[name].reference(parts=2))


def untouched_without_option(rank, world_size):
    try:
        train_extra(rank, world_size, "unused")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.fast
def test_c34_without_the_option_the_error_lists_the_names():
    for said in run_workers(2, untouched_without_option):
        assert "extra.weight" in said and "extra.bias" in said and "find_unused_parameters" in said


def autocast_reference(precision, windows, how_many):
    """One process under torch's autocast, the batch in the parts the ranks have; gradients are averaged in fp32."""
    model = MLP.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS)
    losses, dtype = [], {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for batches in windows:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            for index in range(how_many):
                with torch.autocast("cpu", dtype):
                    loss = MLP.loss(model, MLP.part(batch, index, how_many)) / how_many / len(batches)
                loss.backward()
                total += loss.item()
        losses.append(total)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_autocast(rank, world_size, precision, how):
    recipe = Recipe(
        MLP.build,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS),
        lambda: mlp_windows(micro=4),
        MLP.loss,
    )
    return fit(rank, world_size, recipe, make_plugin("ddp"), how=how, booster_args={"mixed_precision": precision})


@pytest.mark.parametrize("how", ["plain", "no_sync"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_of_the_booster(precision, how):
    """Autocast keeps fp32 weights and gradients: 4 ulps of 16 bits for the few roundings that a scaled loss moves."""
    results = run_workers(2, train_autocast, precision=precision, how=how)
    losses, params = autocast_reference(precision, mlp_windows(micro=4), 2)
    ulp = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    check_close("loss", dict(enumerate(mean_losses(results))), dict(enumerate(losses)), 4 * ulp)
    check_close("parameters", results[0]["params"], params, 4 * ulp)
    assert all(p.dtype == torch.float32 for p in results[0]["params"].values())
    assert results[0]["digest"] == results[1]["digest"]


def layers_of(rank, world_size):
    """unwrap() reaches the user's objects through all wrappers; the scaler and the criterion are there."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("ddp"), mixed_precision="fp16")
    inner, criterion = MLP.build(), nn.MSELoss()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model, wrapped, criterion, *_ = booster.boost(inner, optimizer, criterion)
    out = model(MLP.batch(0)["x"])
    booster.backward(criterion(out, MLP.batch(0)["y"]), wrapped)
    norm = wrapped.clip_grad_by_norm(0.1)
    clipped = torch.stack([p.grad.norm() for p in inner.parameters()]).norm().item()
    wrapped.step()
    return (
        model.unwrap() is inner,
        wrapped.unwrap() is optimizer,
        norm is None or norm > 0.2,
        clipped,
        wrapped.scaler is not None,
    )


def test_wrappers_unwrap_fully():
    for model, optimizer, norm, clipped, scaler in run_workers(2, layers_of):
        assert model and optimizer and norm and scaler
        assert clipped == pytest.approx(0.1, rel=1e-3)  # clip_grad_by_norm unscales first


def refused(rank, world_size):
    from colossalai.booster import Booster

    said = {}
    plugin = make_plugin("ddp")
    for name, call in {
        "fp8_communication": lambda: make_plugin("ddp", fp8_communication=True),
        "loss_reduction": lambda: make_plugin("ddp", loss_reduction="sum"),
        "no_sync": lambda: Booster(plugin=plugin).no_sync(MLP.build()),
    }.items():
        try:
            call()
            said[name] = None
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    make_plugin("ddp", fp8_communication=False)
    return said


@pytest.mark.fast
def test_appendix_c_ddp_arguments():
    said = run_workers(1, refused)[0]
    assert "NotBuiltError" in said["fp8_communication"] and "fp8_communication" in said["fp8_communication"]
    assert "ConfigError" in said["loss_reduction"] and "ConfigError" in said["no_sync"]


def bucket_options(rank, world_size, **plugin_args):
    recipe = Recipe(MLP.build, sgd, mlp_windows, MLP.loss)
    return fit(rank, world_size, recipe, make_plugin("ddp", **plugin_args), read_grads=(2,))


@pytest.mark.parametrize(
    "args",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1, "broadcast_buffers": False},
        {"check_reduction": True},
    ],
    ids=lambda args: "-".join(args),
)
def test_arguments_of_torch_ddp_keep_the_numbers(args):
    check_parity(run_workers(2, bucket_options, **args), Recipe(MLP.build, sgd, mlp_windows, MLP.loss).reference())
