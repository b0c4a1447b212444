"""Optimizer states: whole and by position in the original optimizer, whoever wrote them; exact when resumed."""

import json

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import CheckpointIndexFile, CheckpointIO, GeneralCheckpointIO
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError, ConfigError
from tests.harness import run_workers
from tests.harness.training import ADAM_EPS, check_close
from tests.test_checkpoint_io.common import Trainer, adamw, digest, whole_params

PLUGINS = ["ddp", "fsdp", "zero1", "zero2"]
MLP = TINY_MODELS["MLP"]


def two_groups(model):
    """Weights and biases apart, and a tensor-valued option."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 2e-2}, {"params": params[1::2], "lr": 1e-2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, eps=ADAM_EPS)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "two_groups": two_groups, "adafactor": adafactor, "sgd": momentum}


def resume(rank, world_size, plugin, model, optimizer, folder, shard, steps=(3, 6), **plugin_args):
    """Train without a break; train and save in between; load into a fresh pair and go on: the three digests."""
    start, stop = steps
    make = OPTIMIZERS[optimizer]
    whole_run = Trainer(plugin, model, make, **plugin_args)
    whole_run.steps(range(stop), rank, world_size)
    first = Trainer(plugin, model, make, **plugin_args)
    first.steps(range(start), rank, world_size)
    first.io.save_model(first.model, f"{folder}/model", shard=True)
    first.io.save_optimizer(first.optimizer, f"{folder}/optimizer", shard=shard, size_per_shard=0.01)
    first.steps(range(start, stop), rank, world_size)
    second = Trainer(plugin, model, make, seed=5, **plugin_args)
    second.io.load_model(second.model, f"{folder}/model")
    second.io.load_optimizer(second.optimizer, f"{folder}/optimizer")
    second.steps(range(start, stop), rank, world_size)
    return [run.digest() for run in (whole_run, first, second)]


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("model, optimizer", [("MLP", "two_groups"), ("GPT", "adamw"), ("MLP", "adafactor")])
def test_a_resumed_run_is_bitwise_the_same(plugin, model, optimizer, shard, tmp_path):
    """On three ranks nothing is cut evenly."""
    if plugin == "fsdp" and optimizer == "adafactor":
        pytest.skip("torch's Adafactor does not run on DTensors")
    # On three ranks gloo's all-reduce, so DDP, is not bitwise repeatable: its order depends on the place in the buffer.
    world_size = 3 if model == "MLP" and plugin != "ddp" else 2
    found = run_workers(
        world_size,
        resume,
        timeout=120,
        plugin=plugin,
        model=model,
        optimizer=optimizer,
        folder=str(tmp_path),
        shard=shard,
    )
    assert len({one for rank in found for one in rank}) == 1, found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_c71_masters_are_saved_so_that_resuming_is_bitwise(plugin, precision, tmp_path):
    scale = {"initial_scale": 2**10, "growth_interval": 2} if precision == "fp16" else {}
    case = dict(
        plugin=plugin,
        model="MLP",
        optimizer="adamw",
        folder=str(tmp_path),
        shard=True,
        steps=(5, 10),
        precision=precision,
    )
    found = run_workers(2, resume, timeout=120, **case, **scale)
    assert len({one for rank in found for one in rank}) == 1, found
    index = CheckpointIndexFile.from_file(tmp_path / "optimizer" / "pytorch_optim.bin.index.json")
    states = {}
    for file in index.get_checkpoint_filenames()[0]:
        states |= torch.load(file, weights_only=True)
    assert all(state["master"].dtype == torch.float32 for state in states.values())
    assert ("colossalai_extra" in index.metadata) == (precision == "fp16"), "the loss scale"


def save_one(rank, world_size, plugin, folder, shard, optimizer="two_groups", use_async=False, **plugin_args):
    run = Trainer(plugin, "MLP", OPTIMIZERS[optimizer], **plugin_args)
    run.steps(range(3), rank, world_size)
    run.io.save_model(run.model, f"{folder}/model", shard=True)
    name = "optimizer" if shard or not use_async else "optimizer.safetensors"
    run.io.save_optimizer(run.optimizer, f"{folder}/{name}", shard=shard, size_per_shard=0.0005, use_async=use_async)
    run.io._sync_io()
    run.steps(range(3, 5), rank, world_size)
    return whole_params(run.model)


def go_on(rank, world_size, plugin, folder, optimizer="two_groups", name="optimizer", **options):
    run = Trainer(plugin, "MLP", OPTIMIZERS[optimizer], seed=5)
    run.io.load_model(run.model, f"{folder}/model")
    run.io.load_optimizer(run.optimizer, f"{folder}/{name}", **options)
    run.steps(range(3, 5), rank, world_size)
    return whole_params(run.model)


@pytest.mark.parametrize("writer, ranks", [("zero1", 4), ("fsdp", 3), ("ddp", 2)])
def test_any_plugin_on_any_number_of_ranks_goes_on(writer, ranks, tmp_path):
    wanted = run_workers(ranks, save_one, plugin=writer, folder=str(tmp_path), shard=True)[0]
    for reader, size in (("zero2", 2), ("fsdp", 4), ("ddp", 3), ("zero1", 1)):
        for found in run_workers(size, go_on, plugin=reader, folder=str(tmp_path)):
            check_close(f"{writer} on {ranks} to {reader} on {size}", found, wanted, 1e-5)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("shard", [True, False])
def test_the_format(plugin, shard, tmp_path):
    """What is on the disk is one process's optimizer, by torch's own measure."""
    model = MLP.build()
    optimizer = two_groups(model)
    for step in range(3):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = optimizer.state_dict()
    run_workers(3, save_one, plugin=plugin, folder=str(tmp_path), shard=shard)
    folder = tmp_path / "optimizer"
    if shard:
        index = json.loads((folder / "pytorch_optim.bin.index.json").read_text())
        assert set(index["weight_map"]) == {"0", "1", "2", "3"}
        assert index["metadata"]["param_groups"] == "pytorch_optim_group.bin"
        size = sum(v.numel() * v.element_size() for state in wanted["state"].values() for v in state.values())
        assert index["metadata"]["total_size"] == pytest.approx(size / 2**20)
        files = sorted(folder.glob("pytorch_optim-*.bin"))
        assert [file.name for file in files] == sorted(set(index["weight_map"].values())) and len(files) > 1
        states = {key: state for file in files for key, state in torch.load(file, weights_only=True).items()}
        groups = torch.load(folder / "pytorch_optim_group.bin", weights_only=True)
    else:
        content = torch.load(folder, weights_only=True)
        states, groups = content["state"], content["param_groups"]
    assert groups == wanted["param_groups"] and states.keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert {key: value.shape for key, value in states[index].items()} == {key: v.shape for key, v in state.items()}
        check_close(f"state of {index}", states[index], state, 1e-5)
    MLP.build()
    two_groups(MLP.build()).load_state_dict({"state": states, "param_groups": groups})


def write_as_upstream(folder, states, groups):
    """As §10.4 of the format says, by hand: two shards of plain dicts, the groups, an index in MiB."""
    folder.mkdir()
    parts = [dict(list(states.items())[:1]), dict(list(states.items())[1:])]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        torch.save(part, folder / f"pytorch_optim-{number:05d}.bin")
        weight_map |= {key: f"pytorch_optim-{number:05d}.bin" for key in part}
    torch.save(groups, folder / "pytorch_optim_group.bin")
    index = {"metadata": {"total_size": 0.1, "param_groups": "pytorch_optim_group.bin"}, "weight_map": weight_map}
    (folder / "pytorch_optim.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_checkpoints_of_colossalai_load(plugin, tmp_path):
    model = MLP.build()
    optimizer = two_groups(model)
    for step in range(3):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), tmp_path / "model")
    state = optimizer.state_dict()
    write_as_upstream(tmp_path / "optimizer", state["state"], state["param_groups"])
    torch.save(state, tmp_path / "optimizer.pt")
    for step in range(3, 5):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for name in ("optimizer", "optimizer.pt", "optimizer/pytorch_optim.bin.index.json"):
        for found in run_workers(2, go_on, plugin=plugin, folder=str(tmp_path), name=name, low_cpu_mem_mode=False, num_threads=2):
            check_close(name, found, wanted, 1e-5)


class Late(nn.Module):
    """The second layer has no part in the first steps, so no state."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net, self.late = MLP.build(), nn.Linear(5, 5)

    def forward(self, x, late):
        return self.late(self.net(x)) if late else self.net(x)


def save_and_use_late(rank, world_size, plugin, folder, shard):
    """Save before any step and after two; load each and go on with the late layer."""
    args = {"find_unused_parameters": True} if plugin == "ddp" else {}

    def steps(run, indices):
        for index in indices:
            batch = MLP.part(MLP.batch(index), rank, world_size)
            run.optimizer.backward(nn.functional.mse_loss(run.model(batch["x"], index >= 2), batch["y"]))
            run.optimizer.step()
            run.optimizer.zero_grad()

    run, results = Trainer(plugin, Late, **args), {}
    for done in (0, 2):
        steps(run, range(max(0, done - 2), done))
        run.io.save_model(run.model, f"{folder}/model{done}", shard=shard)
        run.io.save_optimizer(run.optimizer, f"{folder}/optimizer{done}", shard=shard)
        other = Trainer(plugin, Late, **args)
        other.io.load_model(other.model, f"{folder}/model{done}")
        other.io.load_optimizer(other.optimizer, f"{folder}/optimizer{done}")
        steps(other, range(done, 4))
        results[done] = whole_params(other.model)
    return results


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_c31_parameters_without_state(plugin, shard, tmp_path):
    model = Late()
    optimizer = adamw(model)
    for step in range(4):
        batch = MLP.batch(step)
        nn.functional.mse_loss(model(batch["x"], step >= 2), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for found in run_workers(2, save_and_use_late, plugin=plugin, folder=str(tmp_path), shard=shard):
        check_close("saved before any step", found[0], wanted, 1e-5)
        check_close("saved after two steps", found[2], wanted, 1e-5)
    if shard:
        index = json.loads((tmp_path / "optimizer2" / "pytorch_optim.bin.index.json").read_text())
        assert set(index["weight_map"]) == {"0", "1", "2", "3"}
        assert json.loads((tmp_path / "optimizer0" / "pytorch_optim.bin.index.json").read_text())["weight_map"] == {}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("shard", [True, False])
def test_asynchronous_saves_are_equal(plugin, shard, tmp_path):
    wanted = run_workers(2, save_one, plugin=plugin, folder=str(tmp_path), shard=shard, use_async=True)[0]
    name = "optimizer" if shard else "optimizer.safetensors"
    if shard:
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert found >= {"optimizer-00001.safetensors", "optimizer.safetensors.index.json", "pytorch_optim_group.bin"}
    for found in run_workers(3, go_on, plugin=plugin, folder=str(tmp_path), name=name):
        check_close(name, found, wanted, 1e-5)


def save_replicated(rank, world_size, folder):
    """Two replicas of a shard group of two: each group joins its own, the first writes."""
    run = Trainer("zero1", "MLP", two_groups, extra_dp_size=2)
    run.steps(range(3), rank, world_size)
    run.io.save_model(run.model, f"{folder}/model", shard=True)
    run.io.save_optimizer(run.optimizer, f"{folder}/optimizer", shard=True, size_per_shard=0.0005)
    again = Trainer("zero1", "MLP", two_groups, extra_dp_size=2)
    again.io.load_model(again.model, f"{folder}/model")
    again.io.load_optimizer(again.optimizer, f"{folder}/optimizer")
    for one in (run, again):
        one.steps(range(3, 5), rank, world_size)
    return run.digest(), again.digest(), whole_params(run.model)


def test_replicas_of_shard_groups(tmp_path):
    found = run_workers(4, save_replicated, folder=str(tmp_path))
    assert len({digest for first, second, _ in found for digest in (first, second)}) == 1
    for params in run_workers(2, go_on, plugin="zero1", folder=str(tmp_path)):
        check_close("two replicas to two ranks", params, found[0][2], 1e-5)


# -- misuse ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    model = MLP.build()
    optimizer = adamw(model)
    MLP.loss(model, MLP.batch(0)).backward()
    optimizer.step()
    return model, optimizer


def test_misuse_is_named(pair, tmp_path):
    model, optimizer = pair
    io = GeneralCheckpointIO()
    io.save_optimizer(optimizer, tmp_path / "d", shard=True)
    with pytest.raises(ValueError, match=r"\[4\].*\[2, 2\]"):
        io.load_optimizer(two_groups(model), tmp_path / "d")
    with pytest.raises(RuntimeError, match="does not exist"):
        io.load_optimizer(optimizer, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no index"):
        io.load_optimizer(optimizer, tmp_path / "empty")
    index = tmp_path / "d" / "pytorch_optim.bin.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]["param_groups"]
    index.write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match="param_groups"):
        io.load_optimizer(optimizer, tmp_path / "d")
    torch.save([1], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no optimizer checkpoint"):
        io.load_optimizer(optimizer, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="safetensors"):
        io.save_optimizer(optimizer, tmp_path / "x.pt", use_async=True)
    boosted_only = CheckpointIO()
    for call in (
        lambda: boosted_only.save_model(model, tmp_path / "y.pt"),
        lambda: boosted_only.save_optimizer(optimizer, tmp_path / "y.pt"),
        lambda: boosted_only.load_model(model, tmp_path / "y.pt"),
        lambda: boosted_only.load_optimizer(optimizer, tmp_path / "y.pt"),
    ):
        with pytest.raises(AssertionError, match="boost"):
            call()


def test_groups_stay_the_same_objects_for_schedulers(pair, tmp_path):
    model, optimizer = pair
    io = GeneralCheckpointIO()
    optimizer.param_groups[0]["lr"] = 0.5
    io.save_optimizer(optimizer, tmp_path / "x.pt", use_async=False)
    other = adamw(MLP.build())
    group = other.param_groups[0]
    io.load_optimizer(other, tmp_path / "x.pt")
    assert other.param_groups[0] is group and group["lr"] == 0.5
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_prefixes_in_one_directory(pair, tmp_path):
    model, optimizer = pair
    io = GeneralCheckpointIO()
    io.save_optimizer(optimizer, tmp_path, shard=True, prefix="a")
    wanted = digest({str(i): s["exp_avg"] for i, s in optimizer.state_dict()["state"].items()})
    optimizer.state.clear()
    io.save_optimizer(optimizer, tmp_path, shard=True, prefix="b")
    for prefix, found in (("b", digest({})), ("a", wanted)):
        io.load_optimizer(optimizer, tmp_path, prefix)
        assert digest({str(i): s["exp_avg"] for i, s in optimizer.state_dict()["state"].items()}) == found
