"""Our safetensors files are read by safetensors itself, and plain values come back without running code."""

import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from colossalai.utils import safetensors as ours
from colossalai.utils.errors import CheckpointError

DTYPES = [dtype for dtype in ours.DTYPE_NAMES if dtype not in (torch.uint16, torch.uint32, torch.uint64)]


def make(shape, dtype):
    values = torch.arange(torch.Size(shape).numel()) % 7
    return values.to(dtype).reshape(shape)


def write(path, tensors, **metadata):
    file = ours.SafetensorsFile(path, {name: ours.TensorSpec.of(t) for name, t in tensors.items()}, metadata)
    for name, tensor in tensors.items():
        file.put(name, tensor)
    file.close()


shapes = st.lists(st.integers(0, 4), max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
def test_any_tensors_are_read_back(tmp_path_factory, wanted):
    wanted = {name: value for name, value in wanted.items() if name != "__metadata__" and name.isprintable()}
    path = tmp_path_factory.mktemp("safe") / "x.safetensors"
    tensors = {name: make(shape, dtype) for name, (shape, dtype) in wanted.items()}
    write(path, tensors, note="x")
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "x"}
    assert (int.from_bytes(path.read_bytes()[:8], "little")) % 8 == 0


def test_views_and_any_order(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "t": base.t(),
        "row": base[1],
        "column": base[:, 2],
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    write(tmp_path / "x.safetensors", dict(reversed(tensors.items())))
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_was_not_announced_or_is_missing(tmp_path):
    specs = {"a": ours.TensorSpec((2,), torch.float32), "b": ours.TensorSpec((), torch.int64)}
    file = ours.SafetensorsFile(tmp_path / "x", specs)
    for name, tensor in (("c", torch.ones(2)), ("a", torch.ones(3)), ("a", torch.ones(2).double())):
        with pytest.raises(CheckpointError, match=name):
            file.put(name, tensor)
    file.put("a", torch.ones(2))
    with pytest.raises(CheckpointError, match="'b'"):
        file.close()
    with pytest.raises(CheckpointError, match="complex128"):
        ours.make_header({"z": ours.TensorSpec((1,), torch.complex128)})


STATE = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "none": None}, 12: {"count": 4, "name": "x"}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 12], "fused": None}],
}


def test_optimizer_states_in_the_flat_form(tmp_path):
    file = ours.save_nested(tmp_path / "x.safetensors", STATE)
    file.sync_before_step()
    file.synchronize()
    with safe_open(tmp_path / "x.safetensors", "pt") as read:
        assert set(read.keys()) == {
            "state.0.step",
            "state.0.exp_avg",
            "state.12.count",
            "state.12.name",
            "param_groups",
        }
        assert json.loads(read.metadata()["non_tensor_keys"]) == ["state.12.count", "state.12.name"]
        assert pickle.loads(read.get_tensor("state.12.count").numpy().tobytes()) == 4
        assert pickle.loads(read.get_tensor("param_groups").numpy().tobytes()) == STATE["param_groups"]
    found = ours.load_flat(tmp_path / "x.safetensors")
    wanted = {0: {k: v for k, v in STATE["state"][0].items() if v is not None}, 12: STATE["state"][12]}
    assert found["param_groups"] == STATE["param_groups"]
    assert {i: sorted(map(str, state.items())) for i, state in found["state"].items()} == {
        i: sorted(map(str, state.items())) for i, state in wanted.items()
    }
    flat, metadata = ours._flatten_optim_state_dict(STATE["state"])
    assert "param_groups" not in flat and str(ours._unflatten_optim_state_dict(flat, metadata)) == str(wanted)


def test_copies_are_taken_before_the_call_returns(tmp_path):
    tensor, pinned = torch.ones(1000), {"a": torch.empty(1000)}
    files = [
        ours.move_and_save(tmp_path / "x.safetensors", {"a": tensor}),
        ours.move_and_save(tmp_path / "y.safetensors", {"a": tensor}, pinned, {"k": "v"}),
    ]
    tensor.zero_()
    for file in files:
        file.synchronize()
    assert load_file(tmp_path / "x.safetensors")["a"].sum() == 1000 and pinned["a"].sum() == 1000
    with pytest.raises(FileNotFoundError):
        ours.save(tmp_path / "no" / "x.safetensors", {}).synchronize()


class Payload:
    def __reduce__(self):
        return (print, ("code was run",))


@pytest.mark.parametrize("value", [3, 1.5, "x", None, True, [1, (2, {"a": b"b"})], {1, 2}])
def test_plain_values(value):
    assert ours.decode_value(ours.encode_value(value)) == value


def test_values_with_tensors_and_values_that_would_run_code(capsys):
    value = {"lr": torch.tensor(0.1), "more": [torch.ones(2)]}
    assert str(ours.decode_value(ours.encode_value(value))) == str(value)
    for data in (pickle.dumps(Payload()), b"", b"rubbish"):
        with pytest.raises(CheckpointError):
            ours.decode_value(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
    assert "was run" not in capsys.readouterr().out
