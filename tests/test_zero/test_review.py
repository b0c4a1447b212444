"""Ranks that differ in what they use, windows that are edited or thrown away, several optimizers on one model."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from colossalai.utils.errors import ConfigError
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import make_plugin

pytestmark = pytest.mark.fast
STAGES = pytest.mark.parametrize("stage", [1, 2])


class Weights(nn.Module):
    """Parameters of 64 zeros by name; forward sums those that have a factor, in the order given. Numbers stay exact in 16 bits."""

    def __init__(self, *names: str, numel: int = 64) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(numel)))

    def forward(self, **factors: float) -> torch.Tensor:
        return sum(getattr(self, name).sum() * factor for name, factor in factors.items())


def boosted(plugin, model, *optimizers):
    """(booster, boosted model, boosted optimizers)."""
    from colossalai.booster import Booster

    booster, wrapped = Booster(plugin=plugin), []
    for optimizer in optimizers:
        model, optimizer, *_ = booster.boost(model, optimizer)
        wrapped.append(optimizer)
    return booster, model, *wrapped


def values(model) -> dict[str, float]:
    """The one number that all elements of each parameter are."""
    found = {name: p.detach().float().unique().tolist() for name, p in model.unwrap().named_parameters()}
    return {name: numbers[0] if len(numbers) == 1 else numbers for name, numbers in found.items()}


def sgd(params, lr: float = 1.0, **options):
    return torch.optim.SGD(params, lr=lr, **options)


def unequal_use(rank, world_size, stage, how, overlap, precision, factors):
    """Two windows of two; ``factors[rank]`` are u's by micro-batch, None where this rank does not use it."""
    args = dict(reduce_bucket_size_in_m=1 / 2**20, overlap_communication=overlap)
    model = Weights("w", "u")
    booster, model, optimizer = boosted(make_plugin(f"zero{stage}", precision=precision, **args), model, sgd(model.parameters()))
    for _ in range(2):
        for number, factor in enumerate(factors[rank]):
            inside = how == "no_sync" and number == 0
            with booster.no_sync(optimizer=optimizer) if inside else nullcontext():
                used = {} if factor is None else {"u": factor}
                booster.backward(model(w=1, **used), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


USE = {"later": ([1, 2], [None, 4]), "never": ([1, 2], [None, None]), "earlier": ([1, 2], [4, None])}


@STAGES
def test_ranks_that_use_a_parameter_in_different_micro_batches(stage):
    """Under bf16 an accumulator of one rank is fp32 already, another's is not: what they send must match all the same."""
    table = product(("plain", "no_sync"), (True, False), USE)
    cases = {
        f"{how}-{overlap}-{use}": dict(stage=stage, how=how, overlap=overlap, precision="bf16", factors=USE[use])
        for how, overlap, use in table
    }
    found = run_cases(2, unequal_use, cases)
    for name, results in found.items():
        assert not isinstance(results, CaseFailure), str(results)
        total = sum(factor or 0 for part in cases[name]["factors"] for factor in part)
        assert results == [{"w": -4.0, "u": -float(total)}] * 2, name


def two_optimizers(rank, world_size, stage, others):
    """``a`` has its own optimizer, ``b`` and ``c`` another; rank 1 uses only ``others``. One backward serves both."""
    model = Weights("a", "b", "c")
    model.a = nn.Parameter(torch.zeros(128))
    first, second = sgd([model.a]), sgd([model.b, model.c])
    booster, model, first, second = boosted(make_plugin(f"zero{stage}"), model, first, second)
    for _ in range(3):
        booster.backward(model(a=1, **({"b": 2, "c": 4} if rank == 0 else others)), first)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return values(model)


@STAGES
def test_one_backward_for_two_optimizers_of_one_model(stage):
    assert run_workers(2, two_optimizers, stage=stage, others={"b": 2}) == [{"a": -3.0, "b": -6.0, "c": -6.0}] * 2
    assert run_workers(2, two_optimizers, stage=stage, others={}) == [{"a": -3.0, "b": -3.0, "c": -6.0}] * 2


def edit_amid_window(rank, world_size, stage):
    model = Weights("w", "u")
    booster, model, optimizer = boosted(make_plugin(f"zero{stage}"), model, sgd(model.parameters()))
    for _ in range(2):
        booster.backward(model(w=1, u=1), optimizer)
        p = model.unwrap().w
        optimizer.set_param_grad(p, torch.full((64,), 10.0))
        booster.backward(model(w=2, u=2), optimizer)
        optimizer.set_param_grad(p, optimizer.get_param_grad(p) * 2)
        booster.backward(model(w=3, u=3), optimizer)
        optimizer.step()
    return values(model)


@STAGES
def test_edits_amid_a_window_stay_when_more_is_added(stage):
    assert run_workers(2, edit_amid_window, stage=stage) == [{"w": -54.0, "u": -12.0}] * 2


def load_under_two_optimizers(rank, world_size, path):
    model = Weights("a", "b")
    first, second = sgd([model.a]), sgd([model.b])
    booster, model, first, second = boosted(make_plugin("zero1", precision="bf16"), model, first, second)
    for _ in range(2):
        booster.backward(model(a=1, b=1), first)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    booster.load_model(model, path)
    booster.backward(model(a=1, b=1), first)
    first.step()
    second.step()
    return values(model)


def test_load_model_reaches_the_masters_of_every_optimizer(tmp_path):
    path = str(tmp_path / "model.bin")
    torch.save({name: torch.full((64,), 8.0) for name in "ab"}, path)
    assert run_workers(2, load_under_two_optimizers, path=path) == [{"a": 7.0, "b": 7.0}] * 2


def roll_back(rank, world_size):
    """A state saved before the first step has no moments: loading it drops those of the steps since."""
    model = Weights("w")
    booster, model, optimizer = boosted(make_plugin("zero1"), model, sgd(model.parameters(), momentum=0.5))
    start = optimizer.state_dict()
    for state in (None, start):
        if state is not None:
            optimizer.load_state_dict(state)
        booster.backward(model(w=1), optimizer)
        optimizer.step()
    return values(model)


def test_loading_an_earlier_state_drops_what_came_since():
    assert run_workers(2, roll_back) == [{"w": -2.0}] * 2


class GlobalClip(torch.optim.SGD):
    """Clips by the norm of all its gradients, as some optimizers do inside."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def boost_global(rank, world_size):
    model = Weights("w", "u")
    try:
        boosted(make_plugin("zero1"), model, GlobalClip(model.parameters(), lr=1.0))
    except ConfigError as error:
        return str(error)


def test_an_optimizer_that_mixes_tensors_is_refused():
    for message in run_workers(2, boost_global):
        assert "GlobalClip" in message and "TorchDDPPlugin" in message


def by_hand(rank, world_size):
    """A gradient that the user put into ``p.grad`` would be overlooked."""
    model = Weights("w", "u")
    booster, model, optimizer = boosted(make_plugin("zero1"), model, sgd(model.parameters()))
    booster.backward(model(w=1), optimizer)
    model.unwrap().u.grad = torch.ones(64)
    try:
        optimizer.step()
    except ConfigError as error:
        return str(error)


def test_gradients_set_by_hand_are_not_overlooked():
    for message in run_workers(2, by_hand):
        assert "'u'" in message and "set_param_grad" in message


def graph_kept(rank, world_size):
    model = Weights("w")
    booster, model, optimizer = boosted(make_plugin("zero1"), model, sgd(model.parameters()))
    needs = []
    for _ in range(2):
        w = model.unwrap().w
        optimizer.backward((w * w * w).sum() + w.sum(), create_graph=True)
        needs += [bucket.local is not None and bucket.local.requires_grad for bucket in optimizer._buckets]
        optimizer.step()
    return any(needs), values(model)


def test_create_graph_does_not_chain_the_steps():
    assert run_workers(2, graph_kept) == [(False, {"w": -5.0})] * 2


def groups_of_two_sizes(rank, world_size, duplicate):
    """``w`` is shared by all, ``u`` is another parameter on each rank (an expert): the norm is that of all three."""
    from colossalai import comm
    from colossalai.zero import LowLevelZeroOptimizer

    alone = [comm.new_group([r]) for r in range(world_size)][rank]
    model = Weights("w", "u")
    groups = {None: [model.w, model.u] if duplicate else [model.w], alone: [model.u]}
    try:
        optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), pg_to_param_list=groups, clip_grad_norm=1.0)
    except ConfigError as error:
        return str(error)
    optimizer.backward(model(w=1, u=2 + rank))
    optimizer.step()
    return optimizer.get_grad_norm(), model.w[0].item(), model.u[0].item()


def test_one_norm_over_groups_of_several_sizes():
    norm = (64 * (1 + 4 + 9)) ** 0.5
    for rank, found in enumerate(run_workers(2, groups_of_two_sizes, duplicate=False)):
        assert found == pytest.approx((norm, -1 / norm, -(2 + rank) / norm), rel=1e-5)


def lamb_over_groups(rank, world_size):
    """As above, with an optimizer that clips by the norm of all gradients itself."""
    from colossalai import comm
    from colossalai.nn.optimizer import FusedLAMB
    from colossalai.zero import LowLevelZeroOptimizer

    alone = [comm.new_group([r]) for r in range(world_size)][rank]
    model = ones("w", "u")
    optimizer = FusedLAMB(model.parameters(), **LAMB)
    optimizer = LowLevelZeroOptimizer(optimizer, pg_to_param_list={None: [model.w], alone: [model.u]})
    optimizer.backward(model(w=1, u=2 + rank))
    optimizer.step()
    return model.w[0].item(), model.u[0].item()


LAMB = dict(lr=0.1, max_grad_norm=1.0, eps=1.0)


def ones(*names):
    model = Weights(*names)
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def test_lamb_clips_by_all_groups():
    from colossalai.nn.optimizer import FusedLAMB

    model = ones("w", "u", "v")
    optimizer = FusedLAMB(model.parameters(), **LAMB)
    model(w=1, u=2, v=3).backward()
    optimizer.step()
    for rank, found in enumerate(run_workers(2, lamb_over_groups)):
        wanted = model.w[0].item(), (model.u, model.v)[rank][0].item()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_parameter_in_two_process_groups_is_named():
    for message in run_workers(2, groups_of_two_sizes, duplicate=True):
        assert "pg_to_param_list" in message and "parameter 1 of group 0" in message


class Functional(nn.Module):
    """Uses ``other.weight`` without calling ``other``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.body(x), self.other.weight)


def unwrapped_forward(rank, world_size):
    """What is not yet gathered when a forward of the inner model (as ``generate`` makes) has run."""
    import copy

    model = Functional()
    plugin = make_plugin("zero1", overlap_allgather=True, reduce_bucket_size_in_m=1 / 2**20)
    booster, model, optimizer = boosted(plugin, model, sgd([p for n, p in model.named_parameters() if n != "other.bias"]))
    left = []
    for _ in range(3):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model.unwrap()(torch.ones(1, 4))
        left.append(len(optimizer._gathering))
    twin = copy.deepcopy(model.unwrap())
    return left, torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_overlapped_gather_under_the_inner_models_forward():
    assert run_workers(2, unwrapped_forward) == [([0, 0, 0], True)] * 2


def shared_layer(rank, world_size, stage, precision):
    """On rank 0 a layer runs twice under reentrant checkpointing, so that its gradient comes in two parts; on rank 1 once."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in model:
        nn.init.eye_(layer.weight)
    plugin = make_plugin(f"zero{stage}", precision=precision, reduce_bucket_size_in_m=1 / 2**20)
    booster, model, optimizer = boosted(plugin, model, sgd(model.parameters(), lr=1 / 4))
    inner = model.unwrap()
    for _ in range(2):
        out = torch.ones(1, 2, dtype=model.dtype, requires_grad=True)
        for _ in range(2 if rank == 0 else 1):
            out = checkpoint(inner[1], out, use_reentrant=True)
        booster.backward(inner[0](out).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().float() for name, p in inner.named_parameters()}


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_in_two_parts_on_one_rank_only(stage, precision):
    weights = [torch.eye(2).requires_grad_() for _ in range(2)]
    for _ in range(2):
        x = torch.ones(1, 2)
        loss = ((x @ weights[1].T @ weights[1].T @ weights[0].T).sum() + (x @ weights[1].T @ weights[0].T).sum()) / 2
        grads = torch.autograd.grad(loss, weights)
        weights = [(w - g / 4).detach().requires_grad_() for w, g in zip(weights, grads, strict=True)]
    tolerance = 1e-6 if precision == "fp32" else 2**-7
    for found in run_workers(2, shared_layer, stage=stage, precision=precision):
        for name, weight in zip(("0.weight", "1.weight"), weights, strict=True):
            assert torch.allclose(found[name], weight, atol=tolerance), name


class Refuses(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no backward")


def failed_backward(rank, world_size, stage):
    """A backward that breaks off midway, in the second of two windows of one size so that reductions are on their way."""
    model = Weights("w", "u", "v")
    plugin = make_plugin(f"zero{stage}", reduce_bucket_size_in_m=1 / 2**20)
    booster, model, optimizer = boosted(plugin, model, sgd(model.parameters()))
    booster.backward(model(w=1, u=1, v=1), optimizer)
    optimizer.step()
    try:
        inner = model.unwrap()
        booster.backward((Refuses.apply(inner.w) + inner.u * 8 + inner.v * 8).sum(), optimizer)
    except ArithmeticError:
        optimizer.zero_grad()
    booster.backward(model(w=2, u=2, v=2), optimizer)
    optimizer.step()
    return values(model)


@STAGES
def test_a_backward_that_breaks_off_leaves_nothing_after_zero_grad(stage):
    assert run_workers(2, failed_backward, stage=stage) == [{"w": -3.0, "u": -3.0, "v": -3.0}] * 2


def stage_0_by_hand(rank, world_size):
    from colossalai.zero.data_parallel import DataParallelModel, DataParallelOptimizer

    model = DataParallelModel(Weights("w", "u"))
    optimizer = DataParallelOptimizer(sgd(model.parameters()), model)
    for _ in range(2):
        model(w=1 + 2 * rank, **({"u": 2} if rank == 0 else {})).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_stage_0_after_a_backward_by_hand():
    assert run_workers(2, stage_0_by_hand) == [{"w": -4.0, "u": -2.0}] * 2


def copied_model(rank, world_size):
    """A deep copy of the boosted model, as for an average of the weights, is a model of its own."""
    import copy

    model = Weights("w")
    booster, model, optimizer = boosted(make_plugin("zero1", overlap_allgather=True), model, sgd(model.parameters()))
    twin = copy.deepcopy(model)
    booster.backward(model(w=1), optimizer)
    optimizer.step()
    model._force_wait_all_gather()
    return values(model), values(twin), twin(w=1).item()


def test_a_boosted_model_can_be_copied():
    assert run_workers(2, copied_model) == [({"w": -1.0}, {"w": 0.0}, 0.0)] * 2
