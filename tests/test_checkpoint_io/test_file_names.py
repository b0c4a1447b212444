import pytest

from colossalai.checkpoint_io import file_names as names
from colossalai.checkpoint_io.utils import clean_folder
from colossalai.utils.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.fast


def test_names():
    assert names.get_model_base_filenames() == ("pytorch_model.bin", "pytorch_model.bin.index.json")
    assert names.get_model_base_filenames("p", True) == ("model.p.safetensors", "model.safetensors.index.p.json")
    assert names.get_optimizer_base_filenames("p") == (
        "pytorch_optim.p.bin",
        "pytorch_optim.bin.index.p.json",
        "pytorch_optim_group.p.bin",
    )
    assert names.get_optimizer_base_filenames(use_safetensors=True)[2] == "pytorch_optim_group.bin"
    assert names.get_shard_filename("pytorch_model.bin", 0) == "pytorch_model-00001.bin"
    assert names.get_shard_filename("pytorch_model.p.bin", 11) == "pytorch_model.p-00012.bin"


def touch(folder, *files):
    for file in files:
        (folder / file).write_text("{}")


def test_what_a_path_means(tmp_path):
    with pytest.raises(RuntimeError, match="does not exist"):
        names.locate_model(tmp_path / "none")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        names.locate_model(tmp_path)
    touch(tmp_path, "pytorch_model.bin")
    assert names.locate_model(tmp_path) == (False, tmp_path / "pytorch_model.bin")
    touch(tmp_path, "model.safetensors")
    assert names.locate_model(tmp_path) == (False, tmp_path / "model.safetensors")
    touch(tmp_path, "model.safetensors.index.json")
    assert names.locate_model(tmp_path) == (True, tmp_path / "model.safetensors.index.json")
    assert names.locate_model(tmp_path / "model.safetensors.index.json")[0]
    assert names.locate_model(tmp_path / "pytorch_model.bin") == (False, tmp_path / "pytorch_model.bin")
    touch(tmp_path, "pytorch_optim.bin.index.json")
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="different directories"):
            names.locate_model(tmp_path)


def test_where_an_optimizer_is(tmp_path):
    with pytest.raises(ValueError, match="no index"):
        names.locate_optimizer(tmp_path)
    touch(tmp_path, "pytorch_optim.bin.index.a.json", "pytorch_optim.bin.index.b.json")
    assert names.locate_optimizer(tmp_path, "b") == (True, tmp_path / "pytorch_optim.bin.index.b.json")
    with pytest.raises(ConfigError, match="prefix='c'"):
        names.locate_optimizer(tmp_path, "c")
    with pytest.raises(ConfigError, match="2 index files"):
        names.locate_optimizer(tmp_path)


def test_only_numbered_shards_of_the_same_name_are_cleaned(tmp_path):
    kept = [
        "model.safetensors",
        "model.extra-00003.safetensors",
        "model-00001.safetensors",
        "model-1.safetensors",
        "config.json",
    ]
    touch(tmp_path, *kept, "model-00002.safetensors", "model-00001-of-00002.safetensors")
    clean_folder(tmp_path, "model.safetensors", ["model-00001.safetensors"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    stage = "pytorch_model-stage-00001-shard-00001.bin"
    touch(tmp_path, stage, "pytorch_model-stage-00002-shard-00003.bin", "pytorch_model-stage-00001-00002-shard-00001.bin")
    clean_folder(tmp_path, "pytorch_model-stage-00001.bin", [stage], use_pp_format=True)
    assert [path.name for path in tmp_path.glob("pytorch_model*")] == [stage]
