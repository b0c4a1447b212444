"""Lamb, Lars and FusedLAMB against plain formulas, whole and on segments."""

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import FusedLAMB, Lamb, Lars, flat, layerwise
from colossalai.nn.optimizer.segments import own_norms, squared_norms

from .optimizer_cases import give, parameters, worst

pytestmark = pytest.mark.fast


def lamb_formula(p, g, state, t, lr, beta1, beta2, eps, decay, bias, adam):
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    if bias:
        lr = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    update = m / (v.sqrt() + eps) + decay * p
    weight_norm, update_norm = p.norm().item(), update.norm().item()
    ratio = 1.0 if adam or weight_norm == 0 or update_norm == 0 else weight_norm / update_norm
    p.sub_(lr * ratio * update)


def fused_lamb_formula(p, g, state, t, lr, beta1, beta2, eps, decay, bias, decoupled, averaging, adaptive):
    g = g if decoupled else g + decay * p
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1 if averaging else 1.0) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias else (1.0, 1.0)
    update = (m / c1) / ((v / c2).sqrt() + eps) + (decay * p if decoupled else 0)
    weight_norm, update_norm = p.norm().item(), update.norm().item()
    ratio = weight_norm / update_norm if adaptive and weight_norm > 0 and update_norm > 0 else 1.0
    p.sub_(lr * ratio * update)


def lars_formula(p, g, state, t, lr, momentum, eeta, decay, eps, lars=True):
    weight_norm, grad_norm = p.norm().item(), g.norm().item()
    ratio = 1.0
    if lars and weight_norm > 0 and grad_norm > 0:
        ratio = min(max(eeta * weight_norm / (grad_norm + decay * weight_norm + eps), 0.0), 50.0)
    step = (g + decay * p).clamp(-10, 10)
    state["b"] = momentum * state.get("b", 0) + step
    p.sub_(lr * ratio * state["b"])


def both(params, optim, formula, steps=6, grad_dtype=torch.float32, scale=1.0, max_norm=0.0, zero_first=True):
    """Run ``optim`` and ``formula`` (in float64) on the same gradients; the largest relative difference.

    The first tensor is zero at first, so that a trust ratio without a norm is met.
    """
    if zero_first:
        params[0].data.zero_()
    truth = [p.detach().double() for p in params]
    states = [{} for _ in params]
    for t in range(1, steps + 1):
        give(params, t, grad_dtype, scale)
        grads = [p.grad.double() for p in params]
        norm = torch.stack([g.norm() for g in grads]).norm()
        clip = max_norm / norm if max_norm and norm > max_norm else 1.0
        for p, g, state in zip(truth, grads, states, strict=True):
            formula(p, g * clip, state, t)
        optim.step()
    return worst(params, truth)


@pytest.fixture(params=[2**18, 17], ids=["whole", "small batches"])
def batch(request, monkeypatch):
    monkeypatch.setitem(flat.BATCH, "cpu", request.param)


@pytest.mark.parametrize("layout", ["rows", "channels_last", "strided"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay, bias, adam", [(0, False, False), (0.1, False, False), (0.1, True, False), (0.1, True, True)])
def test_lamb(layout, grad_dtype, decay, bias, adam, batch):
    params = parameters(layout=layout)
    optim = Lamb(params, lr=1e-2, betas=(0.8, 0.95), weight_decay=decay, bias_correction=bias, adam=adam)

    def formula(p, g, state, t):
        lamb_formula(p, g, state, t, 1e-2, 0.8, 0.95, 1e-6, decay, bias, adam)

    assert both(params, optim, formula, grad_dtype=grad_dtype) < 1e-6
    assert set(optim.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"} and optim.state[params[1]]["step"] == 6


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("decay, nvlamb", [(0.01, False), (0.0, False), (0.0, True)])
@pytest.mark.parametrize("decoupled, averaging, bias", [(True, True, True), (False, True, True), (True, False, False)])
def test_fused_lamb(max_norm, decay, nvlamb, decoupled, averaging, bias, batch):
    params = parameters()
    optim = FusedLAMB(
        params,
        lr=1e-2,
        bias_correction=bias,
        weight_decay=decay,
        adam_w_mode=decoupled,
        grad_averaging=averaging,
        max_grad_norm=max_norm,
        use_nvlamb=nvlamb,
    )

    def formula(p, g, state, t):
        adaptive = decay != 0 or nvlamb
        fused_lamb_formula(p, g, state, t, 1e-2, 0.9, 0.999, 1e-6, decay, bias, decoupled, averaging, adaptive)

    assert both(params, optim, formula, max_norm=max_norm) < 1e-6
    assert optim.param_groups[0]["step"] == 6


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("decay", [0, 0.1])
@pytest.mark.parametrize("scale, eeta", [(1.0, 1e-3), (20.0, 1.0), (1e-3, 1.0)], ids=["plain", "clamped grads", "clamped ratio"])
def test_lars(momentum, decay, scale, eeta, batch):
    params = parameters()
    optim = Lars(params, lr=0.1, momentum=momentum, eeta=eeta, weight_decay=decay, epsilon=1e-3 if scale > 1 else 0.0)

    def formula(p, g, state, t):
        lars_formula(p, g, state, t, 0.1, momentum, eeta, decay, 1e-3 if scale > 1 else 0.0)

    assert both(params, optim, formula, scale=scale) < 4e-6  # ratios of 50 enlarge the rounding


def test_lars_group_without_adaptation():
    params = parameters()
    optim = Lars([{"params": params[:2]}, {"params": params[2:], "lars": False}], lr=0.1, momentum=0.9, weight_decay=0.1)
    places = {id(p): i for i, p in enumerate(params)}
    truth = [p.detach().double() for p in params]
    states = [{} for _ in params]
    for t in range(4):
        give(params, t)
        for p in params:
            i = places[id(p)]
            lars_formula(truth[i], p.grad.double(), states[i], t, 0.1, 0.9, 1e-3, 0.1, 0.0, lars=i < 2)
        optim.step()
    assert worst(params, truth) < 1e-6


class HalvesNorms:
    """``segment_norms`` for the two halves of every tensor, both in this process; counts how often it is asked."""

    def __init__(self, pieces):
        self.owner = {id(p): i // 2 for i, p in enumerate(pieces)}
        self.calls = 0

    def __call__(self, params, squares, total=False):
        self.calls += 1
        assert squares.shape[1] == len(params)
        if total:
            return squares.sum(dim=1)
        owners = torch.tensor([self.owner[id(p)] for p in params], dtype=torch.long)
        whole = squares.new_zeros(squares.shape[0], len(self.owner)).index_add_(1, owners, squares)
        return whole[:, owners]


@pytest.mark.parametrize(
    "make, calls",
    [
        (lambda ps: Lamb(ps, lr=1e-2, weight_decay=0.1), 1),
        (lambda ps: Lars(ps, lr=0.1, momentum=0.9, weight_decay=0.1), 1),
        (lambda ps: FusedLAMB(ps, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5), 2),
    ],
    ids=["Lamb", "Lars", "FusedLAMB"],
)
def test_segments_give_what_whole_tensors_give(make, calls, batch):
    whole = parameters()
    cut = [p.numel() // 3 for p in whole]
    pieces = [
        nn.Parameter(half.clone())
        for p, c in zip(whole, cut, strict=True)
        for half in p.detach().reshape(-1).split([c, p.numel() - c])
    ]
    one, many = make(whole), make(pieces)
    many.segment_norms = norms = HalvesNorms(pieces)
    for t in range(4):
        give(whole, t)
        halves = [h for p, c in zip(whole, cut, strict=True) for h in p.grad.reshape(-1).split([c, p.numel() - c])]
        for p, g in zip(pieces, halves, strict=True):
            p.grad = g
        one.step()
        many.step()
    joined = [torch.cat(pieces[2 * i : 2 * i + 2]).view(p.shape) for i, p in enumerate(whole)]
    assert worst(joined, whole) < 1e-6
    for p in pieces:
        p.grad = None
    many.step()  # a rank with nothing to do asks as often as the others
    assert norms.calls == 5 * calls


def test_arguments_are_checked():
    params = parameters()
    for cls, options, words in (
        (Lamb, dict(lr=-1.0), "Invalid learning rate"),
        (Lamb, dict(eps=-1.0), "Invalid epsilon"),
        (Lamb, dict(betas=(1.0, 0.9)), "index 0"),
        (Lars, dict(lr=1), "must be a float"),
        (Lars, dict(momentum=-1), "momentum=-1"),
        (Lars, dict(eeta=0), "eeta=0"),
        (Lars, dict(epsilon=-1.0), "epsilon"),
        (FusedLAMB, dict(lr=-1.0), "lr=-1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            cls(params, **options)
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedLAMB(params, amsgrad=True)
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for cls in (Lamb, Lars, FusedLAMB):
        with pytest.raises(RuntimeError, match="sparse gradients"):
            cls(embedding.parameters()).step()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.bfloat16, 3e-6), (torch.float64, 1e-12)])
def test_squared_norms_are_right_at_a_size_where_torch_is_not(dtype, bound):
    values = torch.full((2**24 + 77,), 0.0101).to(dtype)
    true = values.double().square().sum()
    found = squared_norms([values, values[:5], values[:0]])
    assert abs(found[0].double() / true - 1) < bound
    assert found.shape == (3,) and found[2] == 0 and abs(found[1].double() / (5 * values[0].double() ** 2) - 1) < 1e-6


def test_squared_norms_show_what_is_not_finite():
    bad = torch.ones(3000, dtype=torch.float16)
    bad[2999] = float("inf")
    nan = torch.ones(3000)
    nan[10] = float("nan")
    assert torch.isfinite(squared_norms([bad, torch.ones(2000), nan])).tolist() == [False, True, False]
    assert squared_norms([torch.full((2**20,), 60000.0).half()]).isfinite()


def test_default_norms():
    squares = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    params = [torch.zeros(1), torch.zeros(1)]
    assert torch.equal(own_norms(params, squares), squares)
    assert torch.equal(own_norms(params, squares, total=True), torch.tensor([3.0, 7.0]))
    assert layerwise.trust_ratios(torch.tensor([4.0, 0.0, 4.0]), torch.tensor([1.0, 1.0, 0.0])).tolist() == [
        2.0,
        1.0,
        1.0,
    ]


def sharded_lamb(rank, world_size):
    """Lamb on DTensors cut by rows over the ranks, and on the whole tensors: the error of this rank's rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = [p for p in parameters() if p.dim() > 0 and p.numel()]
    parts = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    errors = []
    for make in (lambda ps: Lamb(ps, lr=1e-2, weight_decay=0.1), lambda ps: FusedLAMB(ps, lr=1e-2, max_grad_norm=0.5)):
        one, many = make(whole), make(parts)
        for t in range(3):
            give(whole, t)
            for p, q in zip(parts, whole, strict=True):
                p.grad = distribute_tensor(q.grad.clone(), mesh, [Shard(0)])
            one.step()
            many.step()
        errors.append(worst([p.full_tensor() for p in parts], whole))
    assert all(isinstance(state["exp_avg"], DTensor) for state in many.state.values())
    return errors


def test_dtensors_give_what_whole_tensors_give(workers):
    assert max(e for errors in workers(2).run(sharded_lamb) for e in errors) < 1e-6
