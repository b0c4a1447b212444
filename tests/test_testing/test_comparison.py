"""Assertions that assert: each passes on what is equal and names what is not."""

from types import SimpleNamespace

import pytest
import torch

from colossalai.testing import (
    assert_close,
    assert_close_loose,
    assert_equal,
    assert_equal_in_group,
    assert_hf_output_close,
    assert_not_equal,
    check_state_dict_equal,
)
from tests.harness import run_workers

pytestmark = pytest.mark.fast
ONE = torch.arange(6.0).reshape(2, 3)


def test_equal_and_not_equal():
    assert_equal(ONE, ONE.clone())
    assert_not_equal(ONE, ONE + 1)
    assert_not_equal(ONE, ONE.reshape(3, 2))
    with pytest.raises(AssertionError, match="1 of 6"):
        assert_equal(ONE, ONE + torch.tensor([0.0, 0.0, 1.0]) * torch.tensor([[0.0], [1.0]]))
    with pytest.raises(AssertionError, match="shapes"):
        assert_equal(ONE, ONE.flatten())
    with pytest.raises(AssertionError, match="equal"):
        assert_not_equal(ONE, ONE.clone())
    with pytest.raises(AssertionError):
        assert_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))


def test_close_within_stated_bounds():
    assert_close(ONE, ONE + 1e-7)
    assert_close_loose(ONE.double(), ONE + 5e-4)
    with pytest.raises(AssertionError):
        assert_close(ONE, ONE + 1e-3)
    with pytest.raises(AssertionError):
        assert_close_loose(ONE, ONE + 1e-2)


def test_state_dicts_are_compared_to_the_leaves():
    def state(x):
        return {"state": {0: {"step": 3, "m": torch.tensor([1.0, x])}}, "groups": [{"lr": 0.1, "params": [0, 1]}]}

    check_state_dict_equal(state(2.0), state(2.0))
    with pytest.raises(AssertionError, match=r"state\.0\.m"):
        check_state_dict_equal(state(2.0), state(3.0))
    with pytest.raises(AssertionError, match="keys differ"):
        check_state_dict_equal({"a": 1}, {"b": 1})
    with pytest.raises(AssertionError, match=r"groups\[0\]\.lr"):
        check_state_dict_equal(state(2.0), state(2.0) | {"groups": [{"lr": 0.2, "params": [0, 1]}]})
    half = {"w": torch.ones(2, dtype=torch.float16)}
    check_state_dict_equal(half, {"w": torch.ones(2)}, ignore_dtype=True)
    with pytest.raises(AssertionError, match="float16"):
        check_state_dict_equal(half, {"w": torch.ones(2)})


def test_model_outputs_are_compared_field_by_field():
    cache = SimpleNamespace(keys=[ONE], _private=1)
    one = {"loss": torch.tensor(1.0), "logits": (ONE, ONE), "past_key_values": cache, "none": None}
    two = {"loss": torch.tensor(1.0), "logits": (ONE, ONE + 1), "past_key_values": cache, "none": None}
    assert_hf_output_close(one, dict(one), track_name="llama")
    assert_hf_output_close(one, two, ignore_keys=["logits"])
    with pytest.raises(AssertionError, match=r"llama\.logits\.1"):
        assert_hf_output_close(one, two, track_name="llama")
    with pytest.raises(AssertionError, match="keys differ"):
        assert_hf_output_close(one, {"loss": one["loss"]})
    with pytest.raises(AssertionError, match="none"):
        assert_hf_output_close(one, one | {"none": ONE})


def compare_in_group(rank, world_size, odd):
    try:
        assert_equal_in_group(ONE + (rank == odd))
    except AssertionError as error:
        return str(error)
    return ""


def test_equality_over_a_group_is_seen_on_all_ranks():
    assert run_workers(3, compare_in_group, odd=-1) == ["", "", ""]
    told = run_workers(3, compare_in_group, odd=2)
    assert all("not equal over the group" in text for text in told)
    assert "not as on rank 0, in 6 of 6" in told[2]
