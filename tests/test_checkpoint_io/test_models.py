"""Models under every plugin: written for Hugging Face, read from it, checked before anything is changed."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from colossalai.checkpoint_io import CheckpointIndexFile, GeneralCheckpointIO
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError, ConfigError
from tests.harness import run_workers
from tests.test_checkpoint_io.common import Trainer, digest, whole_params

PLUGINS = ["ddp", "fsdp", "zero1", "zero2"]
FAMILIES = ["LLA", "LLA-T", "GPT", "MIX"]


def keys_on_disk(folder):
    """Every key of the shards of a directory with the tensor."""
    index = CheckpointIndexFile.from_file(next(folder.glob("*.index.json")))
    found = {}
    for file in index.get_checkpoint_filenames()[0]:
        found |= load_file(file) if file.endswith("safetensors") else torch.load(file, weights_only=True)
    assert set(found) == set(index.weight_map)
    assert all(index.get_checkpoint_file(key) == str(folder / index.weight_map[key]) for key in found)
    size = sum(t.numel() * t.element_size() for key, t in found.items() if key != "lm_head.weight" or not is_tied(found))
    assert index.metadata["total_size"] == pytest.approx(size / 2**20)
    assert all(tensor.numel() > 0 for tensor in found.values())
    return found


def is_tied(found):
    embeddings = [found.get(name) for name in ("model.embed_tokens.weight", "transformer.wte.weight")]
    return any(e is not None and e.data_ptr() == found["lm_head.weight"].data_ptr() for e in embeddings)


def save_everywhere(rank, world_size, plugin, families, folder):
    """Train a step, and save each family in all four forms."""
    digests = {}
    for family in families:
        run = Trainer(plugin, family)
        run.step(0, rank, world_size)
        base = f"{folder}/{family}"
        if rank == 0:
            os.makedirs(base, exist_ok=True)
        for safe in (True, False):
            run.io.save_model(run.model, f"{base}/{safe}", shard=True, size_per_shard=0.05, use_safetensors=safe)
        run.io.save_model(run.model, f"{base}/x.safetensors", use_safetensors=True)
        run.io.save_model(run.model, f"{base}/x.pt")
        digests[family] = run.digest()
        if rank == 0:
            torch.save(whole_params(run.model), f"{base}/wanted")
        else:
            whole_params(run.model)
    return digests


@pytest.mark.parametrize("plugin", PLUGINS)
def test_c70_hugging_face_reads_what_every_plugin_writes(plugin, tmp_path):
    from transformers import AutoModelForCausalLM

    digests = run_workers(2, save_everywhere, timeout=120, plugin=plugin, families=FAMILIES, folder=str(tmp_path))
    assert digests[0] == digests[1]
    for family in FAMILIES:
        folder = tmp_path / family
        wanted = torch.load(folder / "wanted")
        for safe in (True, False):
            names = {path.name for path in (folder / str(safe)).iterdir()}
            base = "model.safetensors" if safe else "pytorch_model.bin"
            assert names >= {
                "config.json",
                "generation_config.json",
                f"{base}.index.json",
                base.replace(".", "-00001.", 1),
            }
            read = AutoModelForCausalLM.from_pretrained(folder / str(safe), dtype=torch.float32)
            assert digest(dict(read.named_parameters())) == digest(wanted), (family, safe)
        found = keys_on_disk(folder / "True")
        read.save_pretrained(folder / "hf")
        with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
            assert set(found) == set(file.keys())
            assert all(torch.equal(file.get_tensor(key), found[key]) for key in found)
        assert set(load_file(folder / "x.safetensors")) == set(found)
        state = torch.load(folder / "x.pt", weights_only=True)
        assert set(state) == set(read.state_dict()), "a torch file is the state dict: names in memory, tied ones too"
        model = TINY_MODELS[family].build(1)
        model.load_state_dict(state)
        assert digest(dict(model.named_parameters())) == digest(wanted)
        tied = set(keys_on_disk(folder / "False")) - set(found)
        assert tied == ({"lm_head.weight"} if family in ("LLA-T", "GPT") else set())
        assert json.loads((folder / "True" / "config.json").read_text())["architectures"] == [type(read).__name__]


def load_everything(rank, world_size, plugin, family, paths):
    found = {}
    for path in paths:
        run = Trainer(plugin, family, seed=7)
        run.io.load_model(run.model, path)
        found[path] = run.digest()
    return found


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("family", ["GPT", "MIX"])
def test_every_plugin_reads_what_others_wrote(plugin, family, tmp_path):
    """Single, sharded and .bin checkpoints of Hugging Face and of one process, on three ranks."""
    model = TINY_MODELS[family].build()
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 1
    (tmp_path / "bin").mkdir()
    torch.save(load_file(tmp_path / "single" / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    GeneralCheckpointIO().save_model(model, tmp_path / "ours", shard=True, size_per_shard=0.02)
    index = str(tmp_path / "ours" / "pytorch_model.bin.index.json")
    paths = [str(tmp_path / name) for name in ("single", "sharded", "bin", "state.pt", "ours")] + [index]
    wanted = digest(dict(model.named_parameters()))
    for found in run_workers(3, load_everything, timeout=120, plugin=plugin, family=family, paths=paths):
        assert found == dict.fromkeys(paths, wanted)


def frozen_half():
    model = TINY_MODELS["MLP"].build()
    model[0].requires_grad_(False)
    model.register_buffer("running", torch.arange(3.0))
    model.register_buffer("derived", torch.zeros(2), persistent=False)
    return model


def save_frozen(rank, world_size, plugin, folder):
    run = Trainer(plugin, frozen_half)
    run.io.save_model(run.model, f"{folder}/dir", shard=True)
    run.io.save_model(run.model, f"{folder}/x.pt")
    other = Trainer(plugin, frozen_half)
    with torch.no_grad():
        for p in other.model.parameters():
            p.add_(1.0)
        other.model.unwrap().running.zero_()
    other.io.load_model(other.model, f"{folder}/dir")
    return run.digest(), other.digest(), other.model.unwrap().running.tolist()


@pytest.mark.parametrize("plugin", PLUGINS)
def test_c69_frozen_weights_and_buffers_are_saved_too(plugin, tmp_path):
    wanted = frozen_half().state_dict()
    for saved, loaded, running in run_workers(2, save_frozen, plugin=plugin, folder=str(tmp_path)):
        assert saved == loaded and running == [0.0, 1.0, 2.0]
    for found in (keys_on_disk(tmp_path / "dir"), torch.load(tmp_path / "x.pt")):
        assert {name: value.numel() for name, value in found.items()} == {name: v.numel() for name, v in wanted.items()}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- one process from here -------------------------------------------------------------------------------------------


@pytest.fixture
def io():
    return GeneralCheckpointIO()


def mlp(fill=None):
    model = TINY_MODELS["MLP"].build()
    if fill is not None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(fill)
    return model


def test_prefix_and_size_per_shard(io, tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(5)])  # 1 MiB each
    io.save_model(model, tmp_path, shard=True, size_per_shard=2, prefix="ema", use_safetensors=True)
    names = {f"model.ema-{n:05d}.safetensors" for n in (1, 2, 3)} | {"model.safetensors.index.ema.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    index = json.loads((tmp_path / "model.safetensors.index.ema.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict()), "the prefix is not part of the keys"
    assert index["metadata"]["total_size"] == 5.0
    assert list(index["weight_map"].values()) == [f"model.ema-{n:05d}.safetensors" for n in (1, 1, 2, 2, 3)]
    io.load_model(nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(5)]), tmp_path)


def test_stale_shards_are_removed_and_another_format_is_put_aside(io, tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)])
    io.save_model(model, tmp_path, shard=True, size_per_shard=1, use_safetensors=True)
    io.save_model(model, tmp_path, shard=True, size_per_shard=2, use_safetensors=True)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [f"model-0000{n}.safetensors" for n in (1, 2)]
    save_file({}, tmp_path / "model.safetensors")  # Hugging Face would read this rather than the shards
    io.save_model(model, tmp_path, shard=True, use_safetensors=True)
    assert (tmp_path / "model.safetensors.old").is_file() and not (tmp_path / "model.safetensors").exists()
    io.save_model(model, tmp_path, shard=True)
    assert [path.name for path in tmp_path.glob("*.index.json")] == ["pytorch_model.bin.index.json"]
    io.load_model(model, tmp_path)


def test_misuse_is_named(io, tmp_path, capsys):
    model = mlp()
    for error in (AssertionError, ConfigError):
        with pytest.raises(error, match="safetensors"):
            io.save_model(model, tmp_path / "x.pt", use_safetensors=True)
    with pytest.raises(ConfigError, match="size_per_shard=0"):
        io.save_model(model, tmp_path / "d", shard=True, size_per_shard=0)
    for path in ("none", "none/x.pt"):
        with pytest.raises(RuntimeError, match="none"):
            io.load_model(model, tmp_path / path)
    with pytest.raises(CheckpointError, match="does not exist"):
        io.save_model(model, tmp_path / "no" / "x.pt")
    io.save_model(model, tmp_path / "file.pt")
    before = (tmp_path / "file.pt").read_bytes()
    io.save_model(model, tmp_path / "file.pt", shard=True)
    assert (tmp_path / "file.pt").read_bytes() == before and "is a file" in capsys.readouterr().err
    io.save_model(model, tmp_path / "y.safetensors")  # the suffix says what is wanted
    assert set(load_file(tmp_path / "y.safetensors")) == set(model.state_dict())


def test_what_does_not_fit_is_listed_and_changes_nothing(io, tmp_path):
    state = mlp(1.0).state_dict()
    bad = {
        "lacks.pt": ({k: v for k, v in state.items() if k != "2.bias"}, r"missing: 2\.bias"),
        "more.pt": ({**state, "extra": torch.zeros(1)}, "unexpected: extra"),
        "shape.pt": ({**state, "2.bias": torch.zeros(6)}, r"2\.bias is \(6,\), the model's \(5,\)"),
        "other.pt": ({"a": torch.zeros(1)}, "none of its 1 tensors"),
    }
    for name, (content, message) in bad.items():
        torch.save(content, tmp_path / name)
        model = mlp(0.0)
        with pytest.raises(RuntimeError, match=message) as caught:
            io.load_model(model, tmp_path / name)
        assert name in str(caught.value)
        assert all(not p.any() for p in model.parameters()), "nothing was copied before the check"
    for name in ("lacks.pt", "more.pt"):
        model = mlp(0.0)
        io.load_model(model, tmp_path / name, strict=False)
        assert sum(not p.any() for p in model.parameters()) == (1 if name == "lacks.pt" else 0)
    for name in ("shape.pt", "other.pt"):
        with pytest.raises(CheckpointError):
            io.load_model(mlp(), tmp_path / name, strict=False)


class Payload:
    def __reduce__(self):
        return (print, ("code of a checkpoint was run",))


@pytest.mark.parametrize("damage", ["cut", "rubbish", "empty", "gone"])
@pytest.mark.parametrize("use_safetensors", [True, False])
def test_damaged_files_are_named(io, tmp_path, damage, use_safetensors):
    io.save_model(mlp(), tmp_path / "d", shard=True, size_per_shard=0.0003, use_safetensors=use_safetensors)
    file = sorted((tmp_path / "d").glob("*-00002.*"))[0]
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": file.read_bytes()[:-40], "rubbish": b"rubbish" * 100, "empty": b""}[damage])
    model = mlp(0.0)
    with pytest.raises(CheckpointError, match=file.name):
        io.load_model(model, tmp_path / "d")
    assert all(not p.any() for p in model.parameters())


def test_a_checkpoint_that_would_run_code_is_refused(io, tmp_path, capsys):
    torch.save({"0.weight": Payload()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt"):
        io.load_model(mlp(), tmp_path / "x.pt")
    assert "was run" not in capsys.readouterr().out


def test_loading_casts_to_the_models_dtypes(io, tmp_path):
    model = mlp().to(torch.bfloat16)
    io.save_model(mlp(1.0), tmp_path / "x.pt")
    io.load_model(model, tmp_path / "x.pt")
    assert all(p.dtype == torch.bfloat16 and bool((p == 1).all()) for p in model.parameters())
    model.channels = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    io.save_model(model, tmp_path / "d", shard=True, use_safetensors=True)
    other = mlp(0.0)
    other.channels = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    io.load_model(other, tmp_path / "d")
    assert torch.equal(other.channels.weight, model.channels.weight)
    assert other.channels.weight.is_contiguous(memory_format=torch.channels_last)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_weights_of_any_module(io, tmp_path):
    for name in ("x.safetensors", "x.pt"):
        model, other = Tied(), Tied()
        io.save_model(model, tmp_path / name)
        io.load_model(other, tmp_path / name)
        assert torch.equal(other.second.weight, model.first.weight) and other.second.weight is other.first.weight
    assert set(load_file(tmp_path / "x.safetensors")) == {"first.weight", "first.bias", "second.bias"}
    assert set(torch.load(tmp_path / "x.pt")) == set(model.state_dict())
    torch.save({**model.state_dict(), "second.weight": torch.ones(3, 3)}, tmp_path / "differ.pt")
    with pytest.raises(CheckpointError, match="one tensor in the model"):
        io.load_model(other, tmp_path / "differ.pt")


class Counter(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.zeros(2)), state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("state", [{"count": 3, "names": ["a"]}, torch.arange(3), {"tensor": torch.ones(2)}])
def test_extra_states(io, tmp_path, state):
    for name in ("x.pt", "x.safetensors"):
        other = nn.Sequential(Counter(None))
        io.save_model(nn.Sequential(Counter(state)), tmp_path / name)
        io.load_model(other, tmp_path / name)
        assert str(other[0].state) == str(state)


def test_reading_ahead_gives_the_same(io, tmp_path):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    io.save_model(model, tmp_path, shard=True, size_per_shard=0.03, use_safetensors=True)
    other = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    io.load_model(other, tmp_path, low_cpu_mem_mode=False, num_threads=3)
    assert digest(dict(other.named_parameters())) == digest(dict(model.named_parameters()))
