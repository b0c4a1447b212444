"""Gradients thrown away after clipping, optimizers built before sharding, ranks with other options."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from colossalai.booster import Booster
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import ConfigError
from tests.harness import run_workers
from tests.harness.training import Recipe, check_close, fit, make_plugin, mean_losses, mlp_windows

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]


def scaled():
    """A boosted Linear(4, 1) under fp16 autocast, without a plugin."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    model, optimizer, *_ = Booster(mixed_precision="fp16").boost(model, torch.optim.SGD(model.parameters(), lr=64.0))
    return model, optimizer


def loss(model):
    """Its gradient is 1/64, 1024 at the default loss scale: exact in 16 bits."""
    return model(torch.ones(1, 4)).float().sum() / 64


def test_a_window_thrown_away_after_clipping_leaves_no_scale_behind():
    model, optimizer = scaled()
    start = model.unwrap().weight.detach().clone()
    optimizer.backward(loss(model))
    optimizer.clip_grad_by_norm(1.0)
    optimizer.zero_grad()
    optimizer.backward(loss(model))
    optimizer.step()
    assert torch.allclose(start - model.unwrap().weight, torch.ones(1, 4), atol=1e-6)


def test_backward_after_clipping_in_one_window_is_refused():
    """The second gradient carries the loss scale, the first no longer does."""
    model, optimizer = scaled()
    optimizer.backward(loss(model))
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(ConfigError, match="clip.*zero_grad"):
        optimizer.backward(loss(model))


def test_step_without_gradients_under_loss_scaling():
    model, optimizer = scaled()
    start = model.unwrap().weight.detach().clone()
    scale = optimizer.scaler.get_scale()
    optimizer.step()
    optimizer.backward(loss(model))
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(start, model.unwrap().weight) and optimizer.scaler.get_scale() == scale
    optimizer.backward(loss(model))
    optimizer.step()
    assert torch.allclose(start - model.unwrap().weight, torch.ones(1, 4), atol=1e-6)


def second_optimizer(rank, world_size):
    """An optimizer built before the model was sharded, boosted after it: it holds parameters that are no more."""
    model = MLP.build()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    booster = Booster(plugin=make_plugin("fsdp"))
    model, first, *_ = booster.boost(model, first)
    try:
        booster.boost(model, second)
    except ConfigError as error:
        return str(error)


def test_fsdp_refuses_an_optimizer_of_parameters_it_replaced():
    for message in run_workers(2, second_optimizer):
        assert "optimizer" in message and "boost" in message


def trainable_ignored(rank, world_size):
    model = MLP.build()
    booster = Booster(plugin=make_plugin("fsdp", ignored_modules=[model[0]]))
    try:
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ConfigError as error:
        return str(error)


def test_fsdp_refuses_to_train_what_nobody_averages():
    for message in run_workers(2, trainable_ignored):
        assert "ignored_modules" in message and "0.weight" in message


SGD = Recipe(MLP.build, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), mlp_windows, MLP.loss)


def default_casts(rank, world_size):
    return fit(rank, world_size, SGD, make_plugin("fsdp", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)))


def test_fsdp_casts_the_inputs_of_the_root_as_its_predecessor():
    """FSDP1's MixedPrecision casts the root's inputs by default, those of blocks not."""
    wanted = SGD.reference()
    results = run_workers(2, default_casts)
    check_close("loss", dict(enumerate(mean_losses(results))), dict(enumerate(wanted.losses)), 0.02)
    check_close("parameters", results[0]["params"], wanted.params, 0.02)


def other_rate(rank, world_size):
    model = MLP.build()
    try:
        Booster(plugin=make_plugin("zero1")).boost(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))
    except Exception as error:
        return type(error).__name__, str(error)


def test_c11_ranks_with_other_learning_rates_are_told():
    for kind, message in run_workers(2, other_rate):
        assert kind == "DisagreementError" and "lr" in message
