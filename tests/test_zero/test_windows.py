"""Accumulation windows, buckets and overlap: when gradients are reduced never changes what is computed."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.observer import observe
from tests.harness.training import (
    Case,
    Recipe,
    check_close,
    check_parity,
    fit,
    make_plugin,
    mlp_windows,
    reference,
    train,
)

pytestmark = pytest.mark.fast
MLP = TINY_MODELS["MLP"]
STAGES = pytest.mark.parametrize("stage", [1, 2])


def window_cases() -> dict[str, Case]:
    """3 windows of 4 micro-batches, 3 of them in no_sync."""
    cases = [
        Case(
            plugin=f"zero{stage}",
            model="MLP",
            optimizer="momentum",
            micro=4,
            how=how,
            read_grads=read,
            plugin_args=(("overlap_communication", overlap),),
        )
        for stage, overlap, how, read in product((1, 2), (True, False), ("no_sync", "plain"), ((), (0, 1, 2)))
    ]
    return {f"{case.plugin}-{case.id}{'-read' if case.read_grads else ''}": case for case in cases}


_windows: dict = {}


@pytest.mark.parametrize("name", window_cases())
def test_c21_accumulation_windows(name):
    if not _windows:
        _windows.update(run_cases(2, train, {each: {"case": case} for each, case in window_cases().items()}))
    results = _windows[name]
    assert not isinstance(results, CaseFailure), str(results)
    check_parity(results, reference(window_cases()[name]))


def count_reductions(rank, world_size, stage, how):
    """Reductions of gradients (all-to-all on gloo) by window, seen from outside the library."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for micro in (1, 4, 4, 4):
        with observe() as seen:
            for number in range(micro):
                inside = how == "no_sync" and number < micro - 1
                with booster.no_sync(optimizer=optimizer) if inside else nullcontext():
                    booster.backward(MLP.loss(model, MLP.batch(number)) / micro, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(seen.calls["all_to_all_single"])
    return counts


@pytest.mark.parametrize("how", ["no_sync", "plain"])
def test_c21_stage_1_reduces_once_a_window(how):
    counts = run_workers(2, count_reductions, stage=1, how=how)[0]
    assert counts[0] == 1
    assert counts[2:] == [1, 1] and counts[1] <= 2  # the first longer window may have guessed wrong


def test_c21_stage_2_reduces_on_each_backward_outside_no_sync():
    assert run_workers(2, count_reductions, stage=2, how="plain")[0] == [1, 4, 4, 4]
    assert run_workers(2, count_reductions, stage=2, how="no_sync")[0] == [1, 1, 1, 1]


def wide_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


WIDE = Recipe(wide_mlp, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3), mlp_windows, MLP.loss)
BUCKETS = (1, 64, 10**7)


def train_wide(rank, world_size, stage, overlap, bucket):
    plugin = make_plugin(f"zero{stage}", overlap_communication=overlap, reduce_bucket_size_in_m=bucket / 2**20)
    return fit(rank, world_size, WIDE, plugin, read_grads=(0,))


@pytest.mark.parametrize("world_size", [2, 3])
def test_c25_results_do_not_depend_on_buckets_overlap_or_stage(world_size):
    """A bucket of one element is smaller than any tensor. Without accumulation all variants are equal bit for bit."""
    table = list(product((1, 2), (False, True), BUCKETS))
    cases = {str(row): dict(zip(("stage", "overlap", "bucket"), row, strict=True)) for row in table}
    found = run_cases(world_size, train_wide, cases)
    failures = [str(value) for value in found.values() if isinstance(value, CaseFailure)]
    assert not failures, "\n".join(failures)
    wanted = WIDE.reference()
    for results in found.values():
        check_parity(results, wanted)
    assert len({results[0]["digest"] for results in found.values()}) == 1


def step_inside(rank, world_size, stage):
    """step() inside no_sync changes nothing and loses nothing: the step after the block has the whole window."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    part = MLP.part(MLP.batch(0), rank, world_size)
    before = [p.detach().clone() for p in model.parameters()]
    with booster.no_sync(optimizer=optimizer):
        booster.backward(MLP.loss(model, part), optimizer)
        optimizer.step()
    unchanged = all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    optimizer.step()
    return unchanged, {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@STAGES
def test_step_inside_no_sync_waits_for_the_end_of_the_block(stage):
    wanted = Recipe(MLP.build, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda: mlp_windows(steps=1), MLP.loss)
    for unchanged, params in run_workers(2, step_inside, stage=stage):
        assert unchanged
        check_close("parameters", params, wanted.reference().params, 1e-5)


def irregular_loop(rank, world_size, stage):
    """Windows of any length, one thrown away by zero_grad, a step without backward, retain_graph, backward_by_grad."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for micro in (3, 1, 2):
        for number in range(micro):
            part = MLP.part(MLP.batch(10 * micro + number), rank, world_size)
            booster.backward(MLP.loss(model, part), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.backward(MLP.loss(model, MLP.batch(99)), optimizer)
    optimizer.zero_grad()
    optimizer.step()
    part = MLP.part(MLP.batch(7), rank, world_size)
    loss = MLP.loss(model, part)
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    out = model(part["x"])
    optimizer.backward_by_grad(out, torch.ones_like(out) / len(out) * 0.01)
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@STAGES
def test_irregular_windows(stage):
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for micro in (3, 1, 2):
        for number in range(micro):
            MLP.loss(model, MLP.batch(10 * micro + number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = MLP.batch(7)
    (2 * MLP.loss(model, batch)).backward()
    (model(batch["x"]).sum() / 12 * 0.01).backward()
    optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for params in run_workers(2, irregular_loop, stage=stage):
        check_close("parameters", params, wanted, 1e-5)


def plain_backward(rank, world_size, stage):
    """loss.backward() by the user's own hand, in windows of 1 and 2, mixed with the optimizer's."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, micro in enumerate((1, 2, 2)):
        for number in range(micro):
            loss = MLP.loss(model, MLP.part(MLP.batch(2 * step + number), rank, world_size))
            if number == 0:
                loss.backward()
            else:
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@STAGES
def test_backward_called_by_hand(stage):
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, micro in enumerate((1, 2, 2)):
        for number in range(micro):
            MLP.loss(model, MLP.batch(2 * step + number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run_workers(2, plain_backward, stage=stage):
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)


def edit_gradients(rank, world_size, stage):
    """set_param_grad: what a user does to gradients between backward and step takes effect, under a loss scale too."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}", max_norm=0.5))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(MLP.loss(model, MLP.part(MLP.batch(0), rank, world_size)), optimizer)
    for p in model.unwrap().parameters():
        optimizer.set_param_grad(p, optimizer.get_param_grad(p).clamp(-0.01, 0.01))
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}, optimizer.get_grad_norm()


@STAGES
def test_edited_gradients_are_those_that_are_stepped(stage):
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MLP.loss(model, MLP.batch(0)).backward()
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.01)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    for params, found in run_workers(2, edit_gradients, stage=stage):
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)
        assert found == pytest.approx(norm, rel=1e-5)


def backward_to_some(rank, world_size, stage):
    """backward(inputs=...): only the parameters named get a gradient, and only they move."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    model = MLP.build()
    chosen = model[2].weight
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    optimizer.backward(MLP.loss(model, MLP.part(MLP.batch(0), rank, world_size)), inputs=[chosen])
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@STAGES
def test_backward_to_some_inputs(stage):
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    MLP.loss(model, MLP.batch(0)).backward(inputs=[model[2].weight])
    optimizer.step()
    for params in run_workers(2, backward_to_some, stage=stage):
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)


def hooked(rank, world_size, plugin):
    """A hook of the user's on a parameter, set before boost, still sees and changes its gradient."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(plugin))
    model = MLP.build()
    model[2].weight.register_hook(lambda grad: 0.5 * grad)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(MLP.loss(model, MLP.part(MLP.batch(0), rank, world_size)), optimizer)
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2"])
def test_hooks_on_parameters_stay(plugin):
    model = MLP.build()
    model[2].weight.register_hook(lambda grad: 0.5 * grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MLP.loss(model, MLP.batch(0)).backward()
    optimizer.step()
    for params in run_workers(2, hooked, plugin=plugin):
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)
