import json

import pytest

from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.utils.errors import CheckpointError

pytestmark = pytest.mark.fast


def make(folder):
    index = CheckpointIndexFile(folder)
    index.append_meta_data("total_size", 1.5)
    index.append_meta_data("param_groups", "groups.bin")
    index.append_weight_map("b", "two.bin")
    index.append_weight_map("a", "one.bin")
    index.append_weight_map("c", "one.bin")
    return index


def test_what_is_written_and_read(tmp_path):
    make(tmp_path).write_index_file("x.index.json")
    text = (tmp_path / "x.index.json").read_text()
    assert text.endswith("}\n") and '\n  "metadata"' in text
    assert json.loads(text) == {
        "metadata": {"total_size": 1.5, "param_groups": "groups.bin"},
        "weight_map": {"b": "two.bin", "a": "one.bin", "c": "one.bin"},
    }
    read = CheckpointIndexFile.from_file(tmp_path / "x.index.json")
    assert read.get_checkpoint_filenames() == ([str(tmp_path / "one.bin"), str(tmp_path / "two.bin")], [])
    assert read.get_checkpoint_file("b") == str(tmp_path / "two.bin")
    assert read.get_all_param_names() == ["b", "a", "c"]
    assert read.get_param_group_filename() == str(tmp_path / "groups.bin")
    assert CheckpointIndexFile(tmp_path).get_param_group_filename() is None
    read.assert_no_dtensor_checkpoint()


def test_export_has_its_own_form(tmp_path):
    make(tmp_path).export(tmp_path / "y.json")
    text = (tmp_path / "y.json").read_text()
    assert text.endswith("}") and '\n    "metadata"' in text


def test_pieces_of_distributed_tensors_are_refused(tmp_path):
    index = make(tmp_path)
    index.append_weight_map("d", "layer.weight.dtensor.0.bin")
    assert index.contains_dtensor()
    assert index.get_checkpoint_filenames()[1] == [str(tmp_path / "layer.weight.dtensor.0.bin")]
    with pytest.raises(ValueError, match="distributed"):
        index.assert_no_dtensor_checkpoint()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(tmp_path, text):
    path = tmp_path / "bad.index.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match="bad.index.json"):
        CheckpointIndexFile.from_file(path)
