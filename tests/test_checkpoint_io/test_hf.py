"""Names on disk are those of ``save_pretrained``, tensors are converted group by group, and both forms are read."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colossalai.checkpoint_io import CheckpointIndexFile, GeneralCheckpointIO
from colossalai.checkpoint_io.hf import loading_steps, saving_steps, tied_names_to_drop
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError
from colossalai.utils.safetensors import TensorSpec

pytest.importorskip("transformers")


def deepseek():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    sizes = dict(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    moe = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
    heads = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **moe, **heads, num_key_value_heads=4, first_k_dense_replace=1))


def dinov2():
    """Newer transformers hold gate and up apart, which are one tensor on disk."""
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Model

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14)
    return Dinov2Model(Dinov2Config(**sizes, use_swiglu_ffn=True))


FAMILIES = {"deepseek": deepseek, "dinov2": dinov2, "mixtral": TINY_MODELS["MIX"].build}


def zeroed(make):
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_families(family, tmp_path):
    io, model = GeneralCheckpointIO(), FAMILIES[family]()
    model.save_pretrained(tmp_path / "hf")
    io.save_model(model, tmp_path / "ours", shard=True, use_safetensors=True, size_per_shard=0.01)
    wanted = load_file(tmp_path / "hf" / "model.safetensors")
    index = CheckpointIndexFile.from_file(tmp_path / "ours" / "model.safetensors.index.json")
    found = {key: value for file in index.get_checkpoint_filenames()[0] for key, value in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    torch.save(model.state_dict(), tmp_path / "memory.pt")
    for source in ("hf", "ours", "memory.pt"):
        other = zeroed(FAMILIES[family])
        io.load_model(other, tmp_path / source)
        assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values())), source
    read = type(model).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(read.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_is_converted_at_once_than_must_be(family):
    model = FAMILIES[family]()
    specs = {name: TensorSpec.of(value) for name, value in model.state_dict().items()}
    steps = saving_steps(model, specs)
    assert max(len(step.inputs) for step in steps) <= 2
    assert sorted(name for step in steps for name in step.inputs) == sorted(specs)
    disk = {name: spec for step in steps for name, spec in step.outputs.items()}
    plan = loading_steps(model, disk, specs)
    assert not plan.missing and not plan.unexpected
    assert {name: spec for step in plan.steps for name, spec in step.outputs.items()} == specs
    if family == "mixtral":
        assert len(specs) + 2 * 10 == len(disk), "six tensors in memory are twenty-six on disk"


def test_an_incomplete_set_of_experts_is_refused(tmp_path):
    io, model = GeneralCheckpointIO(), TINY_MODELS["MIX"].build()
    io.save_model(model, tmp_path / "x.safetensors")
    state = load_file(tmp_path / "x.safetensors")
    name = next(name for name in state if "experts.1.w1" in name)
    torch.save({key: value for key, value in state.items() if key != name}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="experts"):
        io.load_model(model, tmp_path / "x.pt")


def test_checkpoints_of_the_base_model_and_of_older_versions(tmp_path):
    """GPT-2 on the hub has no prefix, and buffers that are no more."""
    io, model = GeneralCheckpointIO(), TINY_MODELS["GPT"].build()
    old = {name.removeprefix("transformer."): value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    torch.save(old, tmp_path / "x.pt")
    other = zeroed(TINY_MODELS["GPT"].build)
    io.load_model(other, tmp_path / "x.pt")
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values()))
    llama = TINY_MODELS["LLA"].build()
    torch.save({**llama.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "y.pt")
    io.load_model(llama, tmp_path / "y.pt")


def test_which_name_of_a_tied_tensor_stays():
    for family, dropped in (("GPT", "lm_head.weight"), ("LLA-T", "lm_head.weight")):
        model = TINY_MODELS[family].build()
        names = [
            name
            for name, _ in model.named_parameters(remove_duplicate=False)
            if "lm_head" in name or "embed" in name or "wte" in name
        ]
        assert tied_names_to_drop(model, names) == {dropped}
    assert tied_names_to_drop(None, ["b", "a"]) == {"a"}


def test_any_other_module_keeps_its_names():
    specs = {name: TensorSpec.of(value) for name, value in nn.Linear(2, 3).state_dict().items()}
    assert [(step.inputs, step.outputs) for step in saving_steps(None, specs)] == [((n,), {n: s}) for n, s in specs.items()]
    plan = loading_steps(None, {"weight": specs["weight"], "more": specs["bias"]}, specs)
    assert (plan.missing, plan.unexpected) == (["bias"], ["more"])
