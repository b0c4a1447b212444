"""The helpers that scripts import from ``checkpoint_io.utils``."""

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import CheckpointIndexFile, utils
from colossalai.testing import TINY_MODELS
from colossalai.utils.errors import CheckpointError, ConfigError
from tests.harness import run_workers


@pytest.mark.parametrize("use_safetensors", [True, False])
def test_shards_are_written_and_read(tmp_path, use_safetensors):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    weights, index_name = utils.get_model_base_filenames("p", use_safetensors)
    index = CheckpointIndexFile(tmp_path)
    shards = utils.shard_model_checkpoint(model.state_dict(), max_shard_size=0.002)
    total = utils.save_state_dict_shards(shards, tmp_path, index, weights, True, use_safetensors)
    index.append_meta_data("total_size", total)
    index.write_index_file(index_name)
    assert total == pytest.approx(6 * 272 * 4 / 2**20)
    assert utils.has_index_file(tmp_path) == (True, tmp_path / index_name)
    files = CheckpointIndexFile.from_file(tmp_path / index_name).get_checkpoint_filenames()[0]
    assert len(files) > 2
    for low in (True, False):
        read = {}
        for part in utils.load_state_dict_shards(files, False, use_safetensors, low):
            read |= part
        assert read.keys() == model.state_dict().keys()
        assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    other, missing = nn.Sequential(*[nn.Linear(16, 16) for _ in range(7)]), []
    utils.load_state_dict_into_model(other, read, missing)
    assert missing == ["6.weight", "6.bias"] and torch.equal(other[3].weight, model[3].weight)
    with pytest.raises(CheckpointError, match="unexpected.*6.weight"):
        utils.load_state_dict_into_model(model, other.state_dict(), [], strict=True)
    before = other[0].weight.clone()
    utils.load_state_dict_into_model(other, model.state_dict(), [], load_sub_module=False)
    assert torch.equal(other[0].weight, before)


def test_optimizer_states_are_written_and_read(tmp_path):
    model = TINY_MODELS["MLP"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    states, index_name, groups = utils.get_optimizer_base_filenames()
    index = CheckpointIndexFile(tmp_path)
    utils.save_state_dict_shards(utils.shard_optimizer_checkpoint(state, 0.0005), tmp_path, index, states, True)
    utils.save_param_groups(state, tmp_path / groups)
    other = torch.optim.AdamW(TINY_MODELS["MLP"].build().parameters())
    id_map = utils.load_param_groups_into_optimizer(other, tmp_path / groups)
    assert list(id_map) == [0, 1, 2, 3] and other.param_groups[0]["lr"] == 0.3
    for part in utils.load_state_dict_shards(index.get_checkpoint_filenames()[0], True, False):
        utils.load_states_into_optimizer(other, part, id_map)
    utils.sharded_optimizer_loading_epilogue(other)
    assert str(other.state_dict()) == str(state)
    with pytest.raises(CheckpointError, match="id 9"):
        utils.load_states_into_optimizer(other, {9: {}}, id_map, strict=True)


def test_single_files(tmp_path):
    state = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    for name, safe in (("x.pt", False), ("x.safetensors", True)):
        utils.save_state_dict(state, tmp_path / name, safe)
        read = utils.load_state_dict(tmp_path / name)
        assert all(torch.equal(read[key], value) for key, value in state.items())
    for call in (
        lambda: utils.save_state_dict(state, tmp_path / "x.pt", True),
        lambda: utils.load_shard_state_dict(tmp_path / "x.pt", True),
    ):
        with pytest.raises(ConfigError, match="safetensors"):
            call()
    assert utils.is_safetensors_available()


def test_shapes():
    size = torch.Size
    assert utils.search_tp_partition_dim(size((4, 8)), size((4, 16)), 2) == 1
    assert utils.search_tp_partition_dim(size((4, 8)), size((4, 8)), 2) is None
    with pytest.raises(AssertionError, match="evenly"):
        utils.search_tp_partition_dim(size((3, 8)), size((7, 8)), 2)
    assert utils.search_padding_dim(size((64, 8)), size((50, 8))) == 0
    assert utils.search_padding_dim(size((64, 8)), size((64, 8))) is None
    assert utils.calculate_tensor_size(torch.zeros(2**18)) == 1.0


def test_pinned_copies():
    state = {"a": torch.ones(3), 0: {"b": torch.ones(2), "step": 3}}
    full = utils.create_pinned_state_dict(state, empty=False, num_threads=2)
    assert str(full) == str(state) and full["a"].data_ptr() != state["a"].data_ptr()
    assert utils.create_pinned_state_dict(state)[0]["b"].shape == (2,)


def gather(rank, world_size):
    state = {f"of {rank}": torch.full((2,), rank), "shared": torch.zeros(1)}
    found = utils.gather_state_dict_fast(state, None, dst=1)
    return None if found is None else sorted(found)


def test_the_union_of_state_dicts():
    assert run_workers(3, gather) == [None, ["of 0", "of 1", "of 2", "shared"], None]
