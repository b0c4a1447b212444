"""Any optimizer of torch, and the library's own, gives under ZeRO what it gives in one process."""

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import ADAM_EPS, STEPS, Recipe, check_parity, fit, make_plugin, mlp_windows

MLP, LLA = TINY_MODELS["MLP"], TINY_MODELS["LLA"]


class Lionish(torch.optim.Optimizer):
    """Element-wise, and unknown to the library."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad, alpha=0.1)
                    p.add_(momentum.tanh(), alpha=-group["lr"])


class RowNormalised(Lionish):
    """Works on the rows of a matrix, which a flat piece does not have; unknown to the library too."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad if p.dim() > 1 else p.grad[None]
                    p.add_((rows / (rows.norm(dim=1, keepdim=True) + 0.1)).view_as(p), alpha=-group["lr"])


def own(name, **kwargs):
    """An optimizer of colossalai.nn, imported when it is built."""

    def make(params):
        import colossalai.nn.optimizer as optimizers

        return getattr(optimizers, name)(params, **kwargs)

    return make


def of_torch(name, **kwargs):
    return lambda params: getattr(torch.optim, name)(params, **kwargs)


OPTIMIZERS = {
    "adagrad": of_torch("Adagrad", lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": of_torch("RMSprop", lr=1e-2, momentum=0.9, eps=ADAM_EPS),
    "nesterov": of_torch("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": of_torch("Adam", lr=1e-2, amsgrad=True, eps=ADAM_EPS),
    "nadam": of_torch("NAdam", lr=1e-2, eps=ADAM_EPS),
    "adadelta": of_torch("Adadelta", lr=0.1, eps=ADAM_EPS),
    "adamax": of_torch("Adamax", lr=1e-2, eps=ADAM_EPS),
    "asgd": of_torch("ASGD", lr=0.05),
    "radam": of_torch("RAdam", lr=1e-2, eps=ADAM_EPS),
    "adafactor": of_torch("Adafactor", lr=1e-2),
    "lionish": Lionish,
    "row_normalised": RowNormalised,
    "lamb": own("Lamb", lr=1e-2, eps=ADAM_EPS, weight_decay=0.01),
    "lars": own("Lars", lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused_lamb": own("FusedLAMB", lr=1e-2, eps=ADAM_EPS),
    "hybrid_adam": own("HybridAdam", lr=1e-2, eps=ADAM_EPS, weight_decay=0.01),
    "cpu_adam": own("CPUAdam", lr=1e-2, eps=ADAM_EPS),
    "fused_adam": own("FusedAdam", lr=1e-2, eps=ADAM_EPS),
    "fused_sgd": own("FusedSGD", lr=0.05, momentum=0.9, nesterov=True),
}


def build(name):
    """Two layers more than MLP, so that owners of whole tensors have something to share."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5))


def recipe_of(name):
    if name == "muon":
        return Recipe(only_matrices, muon, lambda: [[LLA.batch(step)] for step in range(STEPS)], LLA.loss)
    return Recipe(lambda: build(name), lambda model: OPTIMIZERS[name](model.parameters()), mlp_windows, MLP.loss)


def only_matrices():
    model = LLA.build()
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return model


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)


def train_with(rank, world_size, name, stage, same_data=False):
    return fit(rank, world_size, recipe_of(name), make_plugin(f"zero{stage}"), same_data=same_data)


_results: dict = {}


def results_of(stage: int, name: str):
    if stage not in _results:
        cases = {each: {"name": each, "stage": stage} for each in OPTIMIZERS}
        _results[stage] = run_cases(2, train_with, cases)
    return _results[stage][name]


@pytest.mark.fast
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c26_any_optimizer(stage, name):
    results = results_of(stage, name)
    assert not isinstance(results, CaseFailure), str(results)
    check_parity(results, recipe_of(name).reference())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_c26_muon_gets_whole_matrices(stage, world_size):
    """Muon rounds to bfloat16 inside: every rank takes the same data, for gradients bitwise those of one process."""
    results = run_workers(world_size, train_with, name="muon", stage=stage, same_data=True, timeout=120)
    check_parity(results, recipe_of("muon").reference())


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars", "row_normalised", "adagrad"])
def test_c26_on_more_ranks_than_some_have_tensors_for(name):
    check_parity(run_workers(4, train_with, name=name, stage=1), recipe_of(name).reference())


class ClosureDriven(Lionish):
    def step(self, closure):
        closure()


def boost_refused(rank, world_size, stage):
    from colossalai.booster import Booster
    from colossalai.utils.errors import ConfigError

    def sparse_model():
        return nn.Embedding(8, 4, sparse=True)

    said = {}
    for name, (model, make) in {
        "LBFGS": (MLP.build(), lambda m: torch.optim.LBFGS(m.parameters())),
        "SparseAdam": (sparse_model(), lambda m: torch.optim.SparseAdam(m.parameters())),
        "ClosureDriven": (MLP.build(), lambda m: ClosureDriven(m.parameters())),
    }.items():
        booster = Booster(plugin=make_plugin(f"zero{stage}"))
        try:
            booster.boost(model, make(model))
        except ConfigError as error:
            said[name] = str(error)
    return said


@pytest.mark.fast
@pytest.mark.parametrize("stage", [1, 2])
def test_c26_closure_driven_and_sparse_optimizers_are_refused_at_boost(stage):
    for said in run_workers(2, boost_refused, stage=stage):
        assert set(said) == {"LBFGS", "SparseAdam", "ClosureDriven"}
        assert all(name in text for name, text in said.items())


def sparse_gradients(rank, world_size):
    """SGD could take the sparse gradients, ZeRO cannot: an error by name, at the latest in the first backward."""
    from colossalai.booster import Booster
    from colossalai.utils.errors import ConfigError

    booster = Booster(plugin=make_plugin("zero1"))
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    try:
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(model(torch.tensor([1, 2])).sum(), optimizer)
    except ConfigError as error:
        return str(error)


def test_a_sparse_embedding_is_refused_by_name():
    assert all("0.weight" in said and "sparse=False" in said for said in run_workers(2, sparse_gradients))


def keeps_state(rank, world_size, stage):
    """State an optimizer has before boost (a warm start, or made at construction) moves to the shards."""
    from colossalai.booster import Booster

    recipe = recipe_of("amsgrad")
    model = recipe.build()
    optimizer = recipe.optimizer(model)
    windows = recipe.windows()
    MLP.loss(model, windows[0][0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    booster = Booster(plugin=make_plugin(f"zero{stage}"))
    before = id(optimizer), id(optimizer.param_groups[0])
    model, wrapped, *_ = booster.boost(model, optimizer)
    same = (id(wrapped.optim), id(wrapped.param_groups[0])) == before and isinstance(wrapped, torch.optim.Optimizer)
    for (batch,) in windows[1:]:
        booster.backward(MLP.loss(model, MLP.part(batch, rank, world_size)), wrapped)
        wrapped.step()
        wrapped.zero_grad()
    return same, {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_users_optimizer_goes_on_with_its_state(stage):
    from tests.harness.training import check_close

    for same, params in run_workers(2, keeps_state, stage=stage):
        assert same
        check_close("parameters", params, recipe_of("amsgrad").reference().params, 1e-5)
