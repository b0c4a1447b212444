"""TorchFSDPPlugin: FSDP1's keyword names on FSDP2, several param groups; what has no counterpart is refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import ADAM_EPS, Recipe, check_close, check_parity, fit, make_plugin, mlp_windows

MLP, LLA = TINY_MODELS["MLP"], TINY_MODELS["LLA"]


def grouped(model):
    groups = [{"params": [p], "lr": 0.01 if p.dim() == 1 else 0.1} for p in model.parameters()]
    return torch.optim.AdamW(groups, eps=ADAM_EPS)


GROUPED = Recipe(MLP.build, grouped, mlp_windows, MLP.loss)
LLAMA = Recipe(LLA.build, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda: [[LLA.batch(s)] for s in range(3)], LLA.loss)

VARIANTS = {
    "defaults": {},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "by name": {"sharding_strategy": "FULL_SHARD", "backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "offload as bool": {"cpu_offload": True},
    "sync": {"sync_module_states": True},
    "classes": {"auto_wrap_policy": {nn.Linear}},
    "fp32 mixed precision": {"mixed_precision": MixedPrecision(param_dtype=torch.float32)},
}


def train_grouped(rank, world_size, variant):
    return fit(rank, world_size, GROUPED, make_plugin("fsdp", **VARIANTS[variant]), read_grads=(0, 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_keep_the_numbers_and_every_group_its_options(variant):
    check_parity(run_workers(2, train_grouped, variant=variant), GROUPED.reference())


def size_policy(module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel > 3000


def policies():
    from functools import partial

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return {
        "ModuleWrapPolicy": ModuleWrapPolicy({LlamaDecoderLayer}),
        "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        "size_based": partial(size_based_auto_wrap_policy, min_num_params=3000),
        "own function": size_policy,
    }


def train_llama(rank, world_size, policy):
    return fit(rank, world_size, LLAMA, make_plugin("fsdp", auto_wrap_policy=policies()[policy]))


@pytest.mark.parametrize("policy", ["ModuleWrapPolicy", "transformer", "size_based", "own function"])
def test_wrap_policies(policy):
    check_parity(run_workers(2, train_llama, policy=policy), LLAMA.reference())


def sharded(rank, world_size):
    """Elements this rank keeps, of parameters and of optimizer states, and whether old Parameter objects are gone."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("fsdp"))
    inner = LLA.build()
    optimizer = torch.optim.AdamW(inner.parameters())
    group = optimizer.param_groups[0]
    model, wrapped, *_ = booster.boost(inner, optimizer)
    booster.backward(LLA.loss(model, LLA.batch(0)), wrapped)
    wrapped.step()
    own = sum(p.to_local().numel() for p in inner.parameters())
    states = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    same = wrapped.unwrap() is optimizer and optimizer.param_groups[0] is group and wrapped.unwrap_model() is inner
    in_model = {id(p) for p in inner.parameters()} == {id(p) for p in group["params"]}
    return own, states, same, in_model


def test_parameters_and_states_are_sharded():
    total = sum(p.numel() for p in LLA.build().parameters())
    results = run_workers(2, sharded)
    assert sum(own for own, *_ in results) == sum(states for _, states, *_ in results) == total
    assert max(own for own, *_ in results) < 0.55 * total
    assert all(same and in_model for *_, same, in_model in results)


def mixed(rank, world_size):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return fit(rank, world_size, LLAMA, make_plugin("fsdp", mixed_precision=policy))


def test_mixed_precision_keeps_fp32_weights():
    """bf16 compute, fp32 gradients: REF16 with unrounded masters, within 4 ulps of bf16 on the weights' updates."""
    from colossalai.testing import reference_run_16bit

    results = run_workers(2, mixed)
    wanted = reference_run_16bit(
        LLA.build(), LLAMA.optimizer, LLAMA.windows(), LLA.loss, torch.bfloat16, parts=2, round_masters=False
    )
    start = dict(LLA.build().named_parameters())
    moved = {name: p - start[name] for name, p in results[0]["params"].items()}
    check_close("updates", moved, {n: p - start[n] for n, p in wanted.masters.items()}, 4 * torch.finfo(torch.bfloat16).eps)


def ignored(rank, world_size):
    """The parameters of ignored modules stay whole; frozen here, since FSDP does not average them."""
    from colossalai.booster import Booster

    model = MLP.build()
    model[0].requires_grad_(False)
    booster = Booster(plugin=make_plugin("fsdp", ignored_modules=[model[0]]))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(MLP.loss(model, MLP.part(MLP.batch(0), rank, world_size)), optimizer)
    optimizer.step()
    inner = model.unwrap()
    return type(inner[0].weight).__name__, type(inner[2].weight).__name__, inner[2].weight.full_tensor().detach()


def test_ignored_modules():
    model = MLP.build()
    MLP.loss(model, MLP.batch(0)).backward()
    wanted = model[2].weight.detach() - 0.1 * model[2].weight.grad
    for whole, cut, weight in run_workers(2, ignored):
        assert (whole, cut) == ("Parameter", "DTensor")
        check_close("weight", {"w": weight}, {"w": wanted}, 1e-5)


def refused(rank, world_size):
    calls = {
        "param_init_fn": {"param_init_fn": print},
        "backward_prefetch": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        "sharding_strategy": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "HYBRID_SHARD": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        "keep_low_precision_grads": {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
        "fp8_communication": {"fp8_communication": True},
        "loss_reduction": {"loss_reduction": "sum"},
    }
    said = {}
    for name, args in calls.items():
        try:
            make_plugin("fsdp", **args)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.fast
def test_what_fsdp2_does_not_have_is_refused_by_name():
    for name, text in run_workers(1, refused)[0].items():
        assert name in text and ("ConfigError" in text or "NotBuiltError" in text)


def no_lora(rank, world_size):
    from colossalai.booster import Booster

    try:
        Booster(plugin=make_plugin("fsdp")).enable_lora(MLP.build(), lora_config=object())
    except AssertionError as error:
        return str(error)


@pytest.mark.fast
def test_appendix_c_lora_under_fsdp():
    assert "TorchFSDPPlugin" in run_workers(1, no_lora)[0]
