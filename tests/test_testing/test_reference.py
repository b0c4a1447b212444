"""The reference runs are plain torch, and the error measure lets nothing pass."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from colossalai.testing import TINY_MODELS, reference_run, reference_run_16bit, tensor_errors, worst_error

pytestmark = pytest.mark.fast


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("name", ["MLP", "LLA", "LLA-T", "GPT", "MIX"])
def test_tiny_models_are_the_same_each_time(name):
    tiny = TINY_MODELS[name]
    before = torch.random.get_rng_state()
    one, two = tiny.build(), tiny.build()
    assert torch.equal(before, torch.random.get_rng_state())
    assert worst_error(one.state_dict(), two.state_dict()) == 0
    assert worst_error(one.state_dict(), tiny.build(seed=1).state_dict()) > 0.1
    batch = tiny.batch(0)
    assert all(len(value) == tiny.rows for value in batch.values())
    loss = tiny.loss(one, batch)
    loss.backward()
    assert math.isfinite(loss.item()) and loss.item() == tiny.loss(two, tiny.batch(0)).item()


def test_the_models_are_those_of_the_field_cases():
    assert [p.numel() for p in TINY_MODELS["MLP"].build().parameters()] == [91, 13, 65, 5]
    llama, tied, gpt = (TINY_MODELS[name].build() for name in ("LLA", "LLA-T", "GPT"))
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert gpt.lm_head.weight is gpt.transformer.wte.weight and gpt.transformer.wte.weight.shape == (101, 32)


def test_reference_is_a_plain_loop():
    tiny = TINY_MODELS["MLP"]
    model = tiny.build()
    optimizer, norms = adamw(model), []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            (tiny.loss(model, tiny.batch(2 * step + micro)) / 2).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    lrs = []
    run = reference_run(
        tiny.build(),
        adamw,
        [[tiny.batch(2 * step), tiny.batch(2 * step + 1)] for step in range(3)],
        tiny.loss,
        max_norm=0.1,
        after_step=lambda optimizer: lrs.append(optimizer.param_groups[0]["lr"]),
    )
    assert worst_error(run.params, dict(model.named_parameters())) == 0
    assert run.norms == norms and len(run.losses) == len(run.grads) == 3 and lrs == [1e-2] * 3
    assert sum(g.square().sum() for g in run.grads[0].values()).sqrt().item() == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 1024.0)])
def test_reference_16_is_near_the_fp32_one_and_independent_of_its_parts(dtype, scale):
    tiny = TINY_MODELS["LLA"]
    steps = [[tiny.batch(step)] for step in range(3)]
    plain = reference_run(tiny.build(), adamw, steps, tiny.loss)
    runs = [reference_run_16bit(tiny.build(), adamw, steps, tiny.loss, dtype, parts=parts, loss_scale=scale) for parts in (1, 2)]
    ulp = torch.finfo(dtype).eps
    for run in runs:
        assert all(p.dtype == dtype for p in run.params.values())
        assert all(p.dtype == torch.float32 for p in run.masters.values())
        assert worst_error({n: p.to(dtype) for n, p in run.masters.items()}, run.params) == 0
        assert run.losses == pytest.approx(plain.losses, rel=4 * ulp)
        assert worst_error(run.grads[0], plain.grads[0]) < 30 * ulp
    assert worst_error(runs[1].grads[0], runs[0].grads[0]) < 30 * ulp


def test_16_bit_gradients_are_summed_in_fp32():
    """C23's numbers: 1 + 64 x 1e-3 is 1.0 if it is summed in bfloat16."""
    model = torch.nn.Linear(1, 1, bias=False)
    batches = [{"x": torch.full((1, 1), value)} for value in [1.0] + [1e-3] * 64]
    run = reference_run_16bit(
        model,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.0),
        [batches],
        lambda m, batch: m(batch["x"]).float().sum(),
        torch.bfloat16,
    )
    assert run.grads[0]["weight"].item() * 65 == pytest.approx(1.064, rel=2e-3)


def test_errors_are_relative_floored_and_never_hide_nan():
    wanted = {"big": torch.tensor([100.0, -50.0]), "zero": torch.zeros(3)}
    assert tensor_errors({"big": torch.tensor([100.0, -49.0]), "zero": torch.zeros(3)}, wanted) == {
        "big": 0.01,
        "zero": 0.0,
    }
    assert tensor_errors(wanted | {"zero": torch.full((3,), 0.01)}, wanted)["zero"] == pytest.approx(0.1)
    for bad in (torch.tensor([math.nan, -50.0]), torch.tensor([math.inf, -50.0]), torch.ones(3)):
        assert tensor_errors(wanted | {"big": bad}, wanted)["big"] == math.inf
    assert tensor_errors({"big": wanted["big"]}, wanted)["zero"] == math.inf
    assert tensor_errors(wanted | {"more": torch.ones(1)}, wanted)["more"] == math.inf
    both = {"x": torch.tensor([math.nan, math.inf, 1.0])}
    assert tensor_errors(both, both) == {"x": 0.0}
    assert worst_error({}, {}) == 0.0
