"""loss_reduction="token": gradients of the mean over all labels of the global batch, whatever each part has of them."""

from itertools import product

import pytest
import torch

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.testing import TINY_MODELS, reference_run, worst_error
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import (
    Recipe,
    check_close,
    check_parity,
    fit,
    make_optimizer,
    make_plugin,
    mean_losses,
    whole_grads,
    whole_params,
)

MODEL = TINY_MODELS["LLA-T"]
STEPS, MICRO = 2, 2


def windows():
    """Micro-batches of 4 rows with very different numbers of labels a row: 15, 3, 9 and 1 after the shift."""
    steps = []
    for step in range(STEPS):
        steps.append([])
        for micro in range(MICRO):
            batch = MODEL.batch(step * MICRO + micro)
            labels = batch["labels"].clone()
            for row, used in enumerate((15, 3, 9, 1) if micro == 0 else (2, 14, 5, 15)):
                labels[row, 1 + used :] = -100
            steps[-1].append(batch | {"labels": labels})
    return steps


RECIPE = Recipe(MODEL.build, lambda m: make_optimizer("sgd1", m), windows, MODEL.loss)


def token_reference(max_norm, steps=STEPS):
    """One process, each window in one batch, whose mean is over all its labels."""
    merged = [[{key: torch.cat([batch[key] for batch in step]) for key in step[0]}] for step in windows()[:steps]]
    return reference_run(MODEL.build(), RECIPE.optimizer, merged, MODEL.loss, max_norm)


def train_tokens(rank, world_size, plugin, how, max_norm, loss_reduction):
    zero = plugin.startswith("zero")
    made = make_plugin(plugin, max_norm if zero else 0.0, loss_reduction=loss_reduction)
    return fit(rank, world_size, RECIPE, made, max_norm=0.0 if zero else max_norm, how=how, read_grads=(0,))


CASES = {
    f"{loss_reduction}-{plugin}-{how}-{max_norm:g}": {
        "plugin": plugin,
        "how": how,
        "max_norm": max_norm,
        "loss_reduction": loss_reduction,
    }
    for loss_reduction, plugin, how, max_norm in product(
        ("token", "mean"), ("ddp", "fsdp", "zero1", "zero2"), ("plain", "no_sync"), (0.0, 0.05)
    )
}
_results: dict = {}


@pytest.mark.parametrize("name", CASES)
def test_token_and_plain_mean(name):
    """2 ranks, windows of 2 micro-batches. By default the gradient is that of the mean of the user's means."""
    if not _results:
        _results.update(run_cases(2, train_tokens, CASES))
    results, case = _results[name], CASES[name]
    assert not isinstance(results, CaseFailure), str(results)
    by_token = token_reference(case["max_norm"])
    by_mean = RECIPE.reference(case["max_norm"], parts=2)
    if case["loss_reduction"] == "token":  # the losses that the user sees stay local means
        assert mean_losses(results)[0] == pytest.approx(by_mean.losses[0], rel=1e-5)
        by_token.losses = mean_losses(results)
    check_parity(results, by_token if case["loss_reduction"] == "token" else by_mean)


def test_the_two_references_differ():
    """Else the test above would show nothing."""
    assert worst_error(token_reference(0.0).grads[0], RECIPE.reference(parts=2).grads[0]) > 0.1


def read_between(rank, world_size, plugin):
    """Reading gradients amid a window, as for a log line, changes nothing about it."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin, loss_reduction="token"))
    model = MODEL.build()
    model, optimizer, *_ = booster.boost(model, RECIPE.optimizer(model))
    for batch in windows()[0]:
        loss = MODEL.loss(model, MODEL.part(batch, rank, world_size)) / MICRO
        booster.backward(loss, optimizer)
        grads = whole_grads(model, optimizer)
    again = whole_grads(model, optimizer)
    optimizer.step()
    return grads, again, whole_params(model)


@pytest.mark.fast
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_reading_gradients_amid_a_window_changes_nothing(plugin):
    wanted = token_reference(0.0, steps=1)
    for grads, again, params in run_workers(2, read_between, plugin=plugin):
        check_close("gradients", grads, wanted.grads[0], 1e-5)
        check_close("gradients read again", again, wanted.grads[0], 1e-5)
        check_close("parameters", params, wanted.params, 1e-5)


def fp16_tokens(rank, world_size, stage):
    plugin = make_plugin(f"zero{stage}", precision="fp16", initial_scale=2.0**10, loss_reduction="token")
    return fit(rank, world_size, RECIPE, plugin, read_grads=(0,)).get("grads")


@pytest.mark.parametrize("stage", [1, 2])
def test_token_weights_under_a_loss_scale(stage):
    """fp16 against the fp32 reference, loosely: 3 % would not hide a wrong weight."""
    grads = run_workers(2, fp16_tokens, stage=stage)[0][0]
    assert worst_error(grads, token_reference(0.0).grads[0]) < 0.03


def autocast_tokens(rank, world_size, precision):
    plugin = make_plugin("ddp", loss_reduction="token")
    return fit(rank, world_size, RECIPE, plugin, read_grads=(0,), booster_args={"mixed_precision": precision}).get("grads")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_token_weights_under_autocast(precision):
    """Against the fp32 reference, loosely: 5 % (bf16) would not hide a wrong weight."""
    grads = run_workers(2, autocast_tokens, precision=precision)[0][0]
    assert worst_error(grads, token_reference(0.0).grads[0]) < 0.05


def misuse(rank, world_size, plugin):
    """Backward without labels, and num_items_in_batch on top."""
    from colossalai.booster import Booster
    from colossalai.utils.errors import ConfigError

    booster = Booster(plugin=make_plugin(plugin, loss_reduction="token"))
    model = MODEL.build()
    model, optimizer, *_ = booster.boost(model, RECIPE.optimizer(model))
    batch, said = MODEL.batch(0), []
    for call in (
        lambda: booster.backward(model(input_ids=batch["input_ids"]).logits.sum(), optimizer),
        lambda: model(**batch, num_items_in_batch=4),
    ):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1"])
def test_token_weights_need_labels(plugin):
    for said in run_workers(2, misuse, plugin=plugin):
        assert len(said) == 2 and "labels" in said[0] and "num_items_in_batch" in said[1]


def two_forwards(rank, world_size):
    torch.manual_seed(0)
    model = TINY_MODELS["LLA"].build()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32", loss_reduction="token"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(0, 101, (2, 8))
    losses = [model(input_ids=ids, labels=ids).loss for _ in range(2)]
    optimizer.zero_grad()  # between forward and backward, as many loops have it: forgets no count
    with pytest.raises(AssertionError, match="2 forwards with labels before one backward"):
        booster.backward(sum(losses), optimizer)


def test_two_forwards_before_one_backward_are_refused():
    run_workers(2, two_forwards)
