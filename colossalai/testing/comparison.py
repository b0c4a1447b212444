"""Assertions about tensors and what holds tensors. They raise AssertionError and say by how much."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from .. import comm

__all__ = [
    "assert_close",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_hf_output_close",
    "assert_not_equal",
    "check_state_dict_equal",
]


def assert_equal(a: Tensor, b: Tensor) -> None:
    """Both have the same shape and every element is equal; NaN equals nothing."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if not torch.equal(a, b):
        raise AssertionError(f"tensors differ in {int((a != b).sum())} of {a.numel()} elements:\n{a}\n{b}")


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    """The shapes differ, or at least one element does."""
    if a.shape == b.shape and torch.equal(a, b):
        raise AssertionError(f"tensors are equal:\n{a}")


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """``|a - b| <= atol + rtol * |b|`` for every element; ``a`` is compared in the dtype of ``b``."""
    assert_close(a.detach().to(b.dtype), b.detach(), rtol=rtol, atol=atol)


def assert_equal_in_group(tensor: Tensor, process_group=None) -> None:
    """``tensor`` is equal on all ranks of the group; otherwise it raises on all of them. Collective.

    The shapes must be equal on all ranks.
    """
    first = tensor.detach().clone()
    comm.broadcast(first, 0, process_group)
    same = torch.equal(first, tensor.detach())
    differs = torch.tensor([0 if same else 1], dtype=torch.int32, device=tensor.device)
    comm.all_reduce(differs, process_group, op="max")
    if differs.item():
        what = "as on rank 0" if same else f"not as on rank 0, in {int((first != tensor).sum())} of {tensor.numel()} elements"
        raise AssertionError(f"tensor is not equal over the group; on rank {comm.rank(process_group)} it is {what}")


def check_state_dict_equal(d1: Mapping, d2: Mapping, ignore_device: bool = True, ignore_dtype: bool = False) -> None:
    """Two state dicts, however nested, have the same keys, lengths and values.

    Args:
        ignore_device: compare tensors on the CPU, whatever devices they are on.
        ignore_dtype: compare tensors in the dtype of those of ``d2``.
    """
    _check_equal(d1, d2, "", ignore_device, ignore_dtype)


def _check_equal(a: Any, b: Any, where: str, ignore_device: bool, ignore_dtype: bool) -> None:
    name = where or "state dict"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _check_tensors(a, b, name, ignore_device, ignore_dtype)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        _check_same_keys(a, b, name)
        for key in a:
            _check_equal(a[key], b[key], f"{where}.{key}" if where else str(key), ignore_device, ignore_dtype)
    elif _is_sequence(a) and _is_sequence(b):
        if len(a) != len(b):
            raise AssertionError(f"{name}: {len(a)} entries and {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _check_equal(x, y, f"{where}[{i}]", ignore_device, ignore_dtype)
    elif isinstance(a, Tensor) != isinstance(b, Tensor) or a != b:
        raise AssertionError(f"{name}: {a!r} and {b!r}")


def _check_tensors(a: Tensor, b: Tensor, name: str, ignore_device: bool, ignore_dtype: bool) -> None:
    if not ignore_device and a.device != b.device:
        raise AssertionError(f"{name}: on {a.device} and on {b.device}")
    if not ignore_dtype and a.dtype != b.dtype:
        raise AssertionError(f"{name}: {a.dtype} and {b.dtype}")
    try:
        assert_equal(a.detach().cpu().to(b.dtype), b.detach().cpu())
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def assert_hf_output_close(
    out1: Any,
    out2: Any,
    ignore_keys: Sequence[str] | None = None,
    track_name: str = "",
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Two outputs of a Hugging Face model are close, through all their fields.

    Args:
        ignore_keys: fields that are not compared, at any depth.
        track_name: how the error calls the outputs.
    """
    if isinstance(out1, Tensor) and isinstance(out2, Tensor):
        assert_close(out1, out2, atol=atol, rtol=rtol, msg=lambda text: f"{track_name or 'output'}: {text}")
        return
    one, two = _children(out1, ignore_keys), _children(out2, ignore_keys)
    if one is None or two is None:
        same = out1 is out2 or (type(out1) is type(out2) and not isinstance(out1, Tensor) and out1 == out2)
        if not same:
            raise AssertionError(f"{track_name or 'output'}: {out1!r} and {out2!r}")
        return
    _check_same_keys(one, two, track_name or "output")
    for key in one:
        assert_hf_output_close(one[key], two[key], ignore_keys, f"{track_name}.{key}".lstrip("."), atol, rtol)


def _children(output: Any, ignore_keys: Sequence[str] | None) -> dict | None:
    """The parts of a container by key, None for what is no container."""
    if isinstance(output, Mapping):
        items: Iterable = output.items()
    elif is_dataclass(output) and not isinstance(output, type):
        items = ((field.name, getattr(output, field.name)) for field in fields(output))
    elif _is_sequence(output):
        items = enumerate(output)
    elif hasattr(output, "__dict__") and not isinstance(output, Tensor):  # a cache of keys and values
        items = ((name, value) for name, value in vars(output).items() if not name.startswith("_"))
    else:
        return None
    return {key: value for key, value in items if not ignore_keys or key not in ignore_keys}


def _check_same_keys(a: Mapping, b: Mapping, name: str) -> None:
    if set(a) != set(b):
        only_a, only_b = (sorted(map(str, set(x) - set(y))) for x, y in ((a, b), (b, a)))
        raise AssertionError(f"{name}: keys differ; only in the first: {only_a}, only in the second: {only_b}")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
