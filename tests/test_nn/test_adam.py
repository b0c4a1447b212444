"""HybridAdam, CPUAdam and FusedAdam against torch's AdamW and Adam, and against the formula where torch has no
option."""

import copy
import math

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import CPUAdam, FusedAdam, HybridAdam, flat
from colossalai.utils.errors import NotBuiltError

from .optimizer_cases import give, parameters, worst

pytestmark = pytest.mark.fast
ALL = [HybridAdam, CPUAdam, FusedAdam]


def trained(optimizer, params, steps=6, missing=(), **grads):
    """``params`` after some steps; those at ``missing`` have no gradient in the first three."""
    for seed in range(steps):
        give(params, seed, missing=missing if seed < 3 else (), **grads)
        optimizer.step()
    return params


def formula(steps=6, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, bias=True, quantum=None, scale=1.0):
    """The same run in float64, from the formula; gradients first rounded to ``quantum``, then divided by ``scale``."""
    params = [p.detach().double() for p in parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for t in range(1, steps + 1):
        source = [nn.Parameter(p.clone().float()) for p in params]
        give(source, t - 1, grad_dtype=quantum, scale=scale)
        for p, (m, v), s in zip(params, moments, source, strict=True):
            g = s.grad.double() / scale
            g = g if decoupled else g + weight_decay * p
            m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
            v.mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
            c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias else (1.0, 1.0)
            if decoupled:
                p.mul_(1 - lr * weight_decay)
            p.sub_(lr / c1 * m / (v.sqrt() / math.sqrt(c2) + eps))
    return params


@pytest.fixture(params=["fused", "small batches", "plain"])
def path(request, monkeypatch):
    """The three ways through flat.py: the kernel at once, in batches that cut tensors, and the foreach form."""
    if request.param == "small batches":
        monkeypatch.setitem(flat.BATCH, "cpu", 17)
    if request.param == "plain":
        monkeypatch.setattr(flat, "FUSED_DEVICES", ())
    return request.param


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("decoupled, reference", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
@pytest.mark.parametrize("layout", ["rows", "channels_last", "strided"])
def test_equals_torch_with_missing_gradients(cls, decoupled, reference, layout, path):
    ours, theirs = parameters(layout=layout), parameters(layout=layout)
    ours_optim = cls(ours, lr=1e-2, weight_decay=0.1, eps=1e-6, betas=(0.8, 0.95), adamw_mode=decoupled)
    missing = (0, 3) if cls is not FusedAdam else ()  # FusedAdam counts steps by group
    trained(ours_optim, ours, missing=missing)
    trained(reference(theirs, lr=1e-2, weight_decay=0.1, eps=1e-6, betas=(0.8, 0.95)), theirs, missing=missing)
    assert worst(ours, theirs) < 1e-6


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("div_scale", [None, 128.0])
def test_equals_the_formula_with_narrow_gradients_and_div_scale(cls, bias, decoupled, grad_dtype, div_scale, path):
    """Upstream ignored div_scale and bias_correction=False for bf16 gradients on the CPU."""
    params = parameters()
    optim = cls(params, lr=1e-2, weight_decay=0.1, bias_correction=bias, adamw_mode=decoupled)
    for seed in range(6):
        give(params, seed, grad_dtype=grad_dtype, scale=div_scale or 1.0)
        before = [p.grad.clone() for p in params]
        optim.step() if div_scale is None else optim.step(div_scale=div_scale)
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True)), "gradients are the user's"
    want = formula(lr=1e-2, weight_decay=0.1, decoupled=decoupled, bias=bias, quantum=grad_dtype, scale=div_scale or 1.0)
    assert worst(params, want) < 1e-6


@pytest.mark.parametrize("cls", ALL)
def test_div_scale_may_be_a_tensor(cls, path):
    first, second = parameters(), parameters()
    one, two = cls(first, lr=1e-2), cls(second, lr=1e-2)
    for seed in range(3):
        give(first, seed, scale=8.0)
        give(second, seed)
        one.step(div_scale=torch.tensor(8.0))
        two.step(div_scale=-1)
    assert worst(first, second) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_parameter_dtypes_keep_their_state_dtype(dtype, path):
    params = parameters(dtype)
    optim = HybridAdam(params, lr=1e-2)
    trained(optim, params)
    assert {s["exp_avg"].dtype for s in optim.state.values()} == {dtype}
    assert worst(params, formula(lr=1e-2)) < {torch.float64: 1e-6}.get(dtype, 3e-2)


def test_state_keys_and_group_keys():
    params = parameters()
    hybrid, fused = HybridAdam(params), FusedAdam(params)
    give(params, 0)
    for optim in (hybrid, hybrid, fused, fused):
        optim.step()
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} and s["step"] == 2 for s in hybrid.state.values())
    assert type(hybrid.state[params[0]]["step"]) is int
    assert all(set(s) == {"exp_avg", "exp_avg_sq"} for s in fused.state.values()) and fused.param_groups[0]["step"] == 2
    assert {"lr", "betas", "eps", "weight_decay", "bias_correction"} <= set(hybrid.defaults)
    assert HybridAdam(params, **hybrid.defaults).defaults == hybrid.defaults
    assert HybridAdam(model_params=params).num_fp32_shards_per_param == 4


def test_arguments_are_checked():
    params = parameters()
    with pytest.raises(NotBuiltError, match="nvme_offload_fraction=0.5"):
        HybridAdam(params, nvme_offload_fraction=0.5)
    with pytest.raises(AssertionError, match="nvme_offload_fraction=2"):
        CPUAdam(params, nvme_offload_fraction=2)
    with pytest.raises(ValueError, match="amsgrad"):
        HybridAdam(params, amsgrad=True)
    with pytest.raises(ValueError, match="lr=-1"):
        HybridAdam(params, lr=-1)
    with pytest.raises(ValueError, match=r"betas\[1\]=1.0"):
        FusedAdam(params, betas=(0.9, 1.0))
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(RuntimeError, match="no longer supported"):
        FusedAdam(params).step(scale=2.0)
    assert HybridAdam(params, my_option=3).param_groups[0]["my_option"] == 3


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        HybridAdam(embedding.parameters()).step()


def test_closure_and_zero_grad():
    params = [nn.Parameter(torch.ones(3))]
    optim = FusedAdam(params)

    def closure():
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    assert optim.step(closure).item() == 3.0
    optim.zero_grad()
    assert params[0].grad is None
    keep = FusedAdam(params, set_grad_none=False)
    keep.step(closure)
    keep.zero_grad()
    assert torch.equal(params[0].grad, torch.zeros(3))


@pytest.mark.parametrize("save, load", [(torch.optim.AdamW, HybridAdam), (FusedAdam, HybridAdam), (HybridAdam, FusedAdam)])
def test_state_moves_between_adams(save, load):
    params = parameters()
    source = save(params, lr=1e-2, weight_decay=0.1)
    trained(source, params, 3)
    twins = copy.deepcopy(params)
    target = load(twins, lr=1e-2, weight_decay=0.1)
    state = copy.deepcopy(source.state_dict())
    for group in state["param_groups"]:
        group.setdefault("bias_correction", True)
    target.load_state_dict(state)
    for optim, ps in ((source, params), (target, twins)):
        give(ps, 9)
        optim.step()
    assert worst(twins, params) < 1e-6


def test_resume_is_bitwise_and_a_row_major_state_is_put_in_the_parameters_order():
    params = parameters(layout="channels_last")
    optim = HybridAdam(params, lr=1e-2)
    trained(optim, params, 3)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = HybridAdam(twins, lr=1e-2)
    state = copy.deepcopy(optim.state_dict())
    state["state"] = {i: {k: v.contiguous() if torch.is_tensor(v) else v for k, v in s.items()} for i, s in state["state"].items()}
    other.load_state_dict(state)
    for o, ps in ((optim, params), (other, twins)):
        give(ps, 9)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))
    assert other.state[twins[4]]["exp_avg"].stride() == twins[4].stride()


def test_state_on_another_device_is_refused():
    params = [nn.Parameter(torch.ones(3))]
    optim = HybridAdam(params)
    give(params, 0)
    optim.step()
    optim.state[params[0]]["exp_avg"] = torch.zeros(3, device="meta")
    with pytest.raises(AssertionError, match="exp_avg of a parameter on cpu is on meta"):
        optim.step()


def test_narrow_gradients_take_no_full_copy():
    """Scratch is one batch, however large the parameters are."""
    params = [nn.Parameter(torch.zeros(3 * 2**20)) for _ in range(2)]
    optim = HybridAdam(params)
    for _ in range(2):
        for p in params:
            p.grad_dtype = None
            p.grad = torch.zeros(p.shape, dtype=torch.bfloat16)
        largest = []
        with _Allocations(largest):
            optim.step()
    assert 0 < max(largest) <= flat.BATCH["cpu"]


class _Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of every tensor made by an op inside."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and func is torch.ops.aten.empty.memory_format:
            self.sizes.append(out.numel())
        return out
