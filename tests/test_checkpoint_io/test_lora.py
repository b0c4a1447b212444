"""Adapters: the base model under its own names, the adapters as peft writes them."""

import os

import pytest
import torch

from colossalai.checkpoint_io import GeneralCheckpointIO
from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.test_checkpoint_io.common import Trainer, digest

peft = pytest.importorskip("peft")


def with_adapters():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(0)
    return peft.get_peft_model(TINY_MODELS["LLA"].build(), config)


def only_trainable(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def save_adapters(rank, world_size, plugin, folder):
    run = Trainer(plugin, with_adapters, only_trainable)
    run.tiny = TINY_MODELS["LLA"]
    run.steps(range(2), rank, world_size)
    for safe in (True, False):
        run.io.save_lora_as_pretrained(run.model, f"{folder}/adapter{safe}", use_safetensors=safe)
    run.io.save_model(run.model, f"{folder}/base", shard=True, use_safetensors=True)
    trained = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in run.model.unwrap(unwrap_peft=False).named_parameters()
    }
    fresh = Trainer(plugin, with_adapters, only_trainable)
    with torch.no_grad():
        for p in fresh.model.unwrap().parameters():
            p.zero_()
    fresh.io.load_model(fresh.model, f"{folder}/base")
    base = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in fresh.model.unwrap().named_parameters()
    }
    return digest(base), trained if rank == 0 else None


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_adapters_and_base_are_read_by_peft_and_transformers(plugin, tmp_path):
    from transformers import AutoModelForCausalLM

    found = run_workers(2, save_adapters, timeout=120, plugin=plugin, folder=str(tmp_path))
    trained = found[0][1]
    base = TINY_MODELS["LLA"].build()
    assert {rank[0] for rank in found} == {digest(dict(base.named_parameters()))}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert digest(dict(read.named_parameters())) == digest(dict(base.named_parameters()))
    for safe, weights in ((True, "adapter_model.safetensors"), (False, "adapter_model.bin")):
        folder = tmp_path / f"adapter{safe}"
        assert {"adapter_config.json", weights} <= set(os.listdir(folder))
        model = peft.PeftModel.from_pretrained(TINY_MODELS["LLA"].build(), folder)
        loaded = {name: value for name, value in model.named_parameters() if ".lora_" in name or ".modules_to_save." in name}
        assert len(loaded) == 17
        assert all(torch.equal(value, trained[name]) for name, value in loaded.items())


def test_a_model_without_adapters_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="enable_lora"):
        GeneralCheckpointIO().save_lora_as_pretrained(TINY_MODELS["MLP"].build(), tmp_path)
