"""bf16 and fp16 against REF16: 16-bit weights cast from fp32 masters, gradients summed in fp32, the same loss scale.

Bounds: the first step's gradients are sums of the same 16-bit numbers, so they differ by fp32 rounding only, 1e-5.
Later a master that differs by such a rounding may fall on the other side of a 16-bit one: weights within 2 ulps of
their largest element, gradients and norms within 4 ulps. A wrong factor or a 16-bit sum is far outside.
"""

from itertools import product

import pytest
import torch
from torch import nn

from colossalai.testing import TINY_MODELS, tensor_errors
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import (
    DTYPES,
    Case,
    check_close,
    check_equal_on_ranks,
    make_plugin,
    mean_losses,
    reference_16bit,
    train,
    whole_params,
)

MLP = TINY_MODELS["MLP"]
SCALE = 2.0**10
PRECISIONS = {"bf16": 1.0, "fp16": SCALE}


def cases() -> dict[str, Case]:
    table = [
        Case(
            plugin=f"zero{stage}",
            model=model,
            optimizer=optimizer,
            max_norm=max_norm,
            micro=micro,
            precision=precision,
            read_grads=(0, 2),
            plugin_args=(("initial_scale", SCALE),) if precision == "fp16" else (),
        )
        for precision, stage, model, (optimizer, max_norm, micro) in product(
            PRECISIONS,
            (1, 2),
            ("MLP", "LLA", "LLA-T", "GPT"),
            (("sgd1", 0.0, 1), ("sgd1", 0.05, 4), ("adamw", 0.05, 1)),
        )
    ]
    return {f"{case.plugin}-{case.id}": case for case in table}


_results: dict = {}


@pytest.mark.parametrize("name", cases())
def test_parity_in_16_bits(name):
    if not _results:
        _results.update(run_cases(2, train, {each: {"case": case} for each, case in cases().items()}))
    results, case = _results[name], cases()[name]
    assert not isinstance(results, CaseFailure), str(results)
    wanted, ulp = reference_16bit(case, 2, PRECISIONS[case.precision]), torch.finfo(DTYPES[case.precision]).eps
    first = results[0]
    assert all(p.dtype == DTYPES[case.precision] for p in first["params"].values())
    check_close("gradients of the first step", first["grads"][0], wanted.grads[0], 1e-5)
    check_close("gradients of the last step", first["grads"][2], wanted.grads[2], 4 * ulp)
    check_close("loss", dict(enumerate(mean_losses(results))), dict(enumerate(wanted.losses)), 4 * ulp)
    for result in results:
        check_close("norms", dict(enumerate(result["norms"])), dict(enumerate(wanted.norms)), 4 * ulp)
    check_close("weights", first["params"], wanted.params, 2 * ulp)
    check_equal_on_ranks(results)


@pytest.mark.fast
@pytest.mark.parametrize("stage", [1, 2])
def test_c19_the_norm_is_unscaled(stage):
    """fp16 with a loss scale of 2**10 and a max_norm that never clips: the norm is that of fp32 within 1 %."""
    from tests.harness.training import reference

    args = (("initial_scale", 2**10),)
    case = Case(plugin=f"zero{stage}", max_norm=1e9, precision="fp16", plugin_args=args)
    wanted = reference(Case(max_norm=1e9)).norms
    for result in run_workers(2, train, case=case):
        assert result["norms"] == pytest.approx(wanted, rel=0.01)


def sum_small(rank, world_size, plugin, how, precision="bf16"):
    """One weight, gradients 1.0 and 64 times 1e-3: 1.064, which bfloat16 cannot add up."""
    from contextlib import nullcontext

    from colossalai.booster import Booster

    args = {"precision": precision} if plugin.startswith("zero") else {}
    booster = Booster(plugin=make_plugin(plugin, **args), mixed_precision=None if args else precision)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    start = whole_params(model)["weight"].float().item()
    for number in range(65):
        with booster.no_sync(model, optimizer) if how == "no_sync" and number < 64 else nullcontext():
            x = torch.full((1, 1), 1.0 if number == 0 else 1e-3)
            booster.backward(model(x).float().sum(), optimizer)
    grad = optimizer.get_param_grad(next(model.unwrap().parameters())).float().item()
    optimizer.step()
    return grad, start - whole_params(model)["weight"].float().item()


@pytest.mark.fast
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("plugin, how", [("zero1", "plain"), ("zero1", "no_sync"), ("zero2", "plain"), ("zero2", "no_sync")])
def test_c23_small_contributions_do_not_vanish(world_size, plugin, how):
    for grad, _ in run_workers(world_size, sum_small, plugin=plugin, how=how):
        assert grad == pytest.approx(1.064, rel=2e-3)


def test_c23_under_autocast_too():
    for grad, moved in run_workers(2, sum_small, plugin="ddp", how="no_sync"):
        assert grad == pytest.approx(1.064, rel=2e-3) and moved == pytest.approx(1.064, rel=2e-3)


def steps_of_16_bit_weights(rank, world_size, precision):
    """master_weights=False: the optimizer steps the 16-bit weights themselves."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("zero1", precision=precision, master_weights=False, initial_scale=SCALE))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    state_bytes = sum(p.numel() * p.element_size() for p in optimizer.optim.param_groups[0]["params"])
    return whole_params(model), state_bytes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_master_weights(precision):
    dtype, scale = DTYPES[precision], PRECISIONS[precision]
    model = MLP.build().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        sums = None
        for index in range(2):
            part = MLP.part(MLP.batch(step), index, 2)
            (MLP.loss(model, part | {"x": part["x"].to(dtype)}) * scale).backward()
            grads = [p.grad.float() for p in model.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            optimizer.zero_grad()
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = (total / 2 / scale).to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    results = run_workers(2, steps_of_16_bit_weights, precision=precision)
    for params, _ in results:
        check_close("weights", params, wanted, torch.finfo(dtype).eps)
    assert sum(state_bytes for _, state_bytes in results) == 2 * 174


def send_in(rank, world_size, stage, communication_dtype):
    """fp32 gradients that travel in 16 bits: each rank's are rounded once, the sum is not."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}", communication_dtype=communication_dtype))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(MLP.loss(model, MLP.part(MLP.batch(0), rank, world_size)), optimizer)
    return {name: optimizer.get_param_grad(p) for name, p in model.unwrap().named_parameters()}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_communication_dtype(stage, dtype):
    wanted: dict = {}
    for index in range(2):
        model = MLP.build()
        MLP.loss(model, MLP.part(MLP.batch(0), index, 2)).backward()
        for name, p in model.named_parameters():
            wanted[name] = wanted.get(name, 0) + p.grad.to(dtype).float() / 2
    exact = MLP.build()
    MLP.loss(exact, MLP.batch(0)).backward()
    for grads in run_workers(2, send_in, stage=stage, communication_dtype=dtype):
        check_close("gradients", grads, wanted, 1e-5)
        assert max(tensor_errors(grads, {n: p.grad for n, p in exact.named_parameters()}).values()) > 1e-5  # it did round


def inputs_seen(rank, world_size, cast_inputs):
    """The dtype in which floating inputs arrive, whole numbers being left alone."""
    from colossalai.booster import Booster

    class Probe(nn.Linear):
        def forward(self, x, ids, more):
            self.seen = [x.dtype, ids.dtype, more["mask"].dtype]
            return super().forward(x.to(self.weight.dtype))

    booster = Booster(plugin=make_plugin("zero1", precision="bf16", cast_inputs=cast_inputs))
    model = Probe(3, 2)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3), torch.ones(1, dtype=torch.int64), more={"mask": torch.ones(1)})
    return [str(dtype) for dtype in model.unwrap().seen]


def test_cast_inputs():
    assert run_workers(1, inputs_seen, cast_inputs=True) == [["torch.bfloat16", "torch.int64", "torch.bfloat16"]]
    assert run_workers(1, inputs_seen, cast_inputs=False) == [["torch.float32", "torch.int64", "torch.float32"]]
