"""Writing safetensors files tensor by tensor, and optimizer states as one flat safetensors file.

A safetensors file is eight bytes of header length, a JSON header that gives each tensor's dtype, shape and byte
range, and then the bytes. Where dtypes and shapes are known in advance the header can be written first and each
tensor as it comes, so that writing needs the memory of one tensor, whatever the size of the file.

The flat form of an optimizer's state has the keys ``state.<param id>.<name>``. Values that are no tensors are pickled
into uint8 tensors, and the header lists them; reading them back accepts plain values only and never runs code.
"""

import io
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from .errors import CheckpointError

PathLike = Union[str, "os.PathLike[str]"]

NON_TENSOR_KEYS = "non_tensor_keys"
PARAM_GROUPS = "param_groups"
# One write call; the kernel takes at most 2 GiB at once.
_CHUNK_BYTES = 64 * 2**20

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPE_NAMES = {getattr(torch, name): code for name, code in _NAMES.items() if hasattr(torch, name)}
DTYPES = {code: dtype for dtype, code in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def make_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict]:
    """(the header with its length in front, {name: offset in the file}).

    Tensors lie by falling item size, so that each is aligned to its own; the header is padded to a multiple of eight.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    position, begins = 0, {}
    for name in order:
        spec = specs[name]
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: safetensors has no dtype {spec.dtype}, save it with use_safetensors=False")
        begins[name] = position
        end = position + spec.nbytes
        table[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major; no copy where it lies on the CPU and is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


class SafetensorsFile:
    """A safetensors file being written, tensor by tensor in any order.

    Args:
        path: must not exist yet.
        specs: every tensor that will come.
        metadata: strings for the header; ``format: pt`` is added.

    Raises:
        CheckpointError: from :meth:`put` and :meth:`close`, for a tensor that was not announced, or is missing.
    """

    def __init__(self, path: PathLike, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self._specs = dict(specs)
        self._missing = set(specs)
        header, self._offsets = make_header(specs, {"format": "pt", **(metadata or {})})
        self._file = open(self.path, "xb", buffering=0)
        self._write(header, 0)

    def _write(self, data, offset: int) -> None:
        self._file.seek(offset)
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view[:_CHUNK_BYTES]) :]

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; it may be changed afterwards."""
        spec = self._specs.get(name)
        if spec != TensorSpec.of(tensor):
            raise CheckpointError(f"{self.path}: {name} is {TensorSpec.of(tensor)}, announced was {spec}")
        self._write(tensor_bytes(tensor), self._offsets[name])
        self._missing.discard(name)

    def close(self) -> None:
        """Force everything to the disk."""
        if self._missing:
            self.abort()
            raise CheckpointError(f"{self.path}: nothing was written for {sorted(self._missing)[:5]}")
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        """Close without a promise about the contents."""
        self._file.close()


# -- values that are no tensors ----------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings and containers of them; anything that would import or call something is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def encode_value(value: Any) -> Tensor:
    """A plain value, or a container with tensors in it, as a uint8 tensor."""
    try:
        data = pickle.dumps(value)
        _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # tensors inside: torch's own format, which reads back without running code
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_value(encoded: Tensor) -> Any:
    """The inverse of :func:`encode_value`; CheckpointError where the bytes are not a plain value."""
    data = encoded.cpu().contiguous().numpy().tobytes()
    try:
        if data.startswith(b"PK"):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise CheckpointError(f"a stored value cannot be read: {error}") from error


def _flatten_optim_state_dict(state_dict: dict, seperator: str = ".") -> tuple[dict[str, Tensor], dict | None]:
    """({flat key: tensor}, {"non_tensor_keys": keys} or None) of a state dict, or of its ``"state"`` alone."""
    flat, non_tensor = {}, []
    for param_id, state in state_dict.get("state", state_dict).items():
        for name, value in state.items():
            if value is None:
                continue
            key = f"state{seperator}{param_id}{seperator}{name}"
            if not isinstance(value, Tensor):
                non_tensor.append(key)
                value = encode_value(value)
            flat[key] = value
    if "state" in state_dict and PARAM_GROUPS in state_dict:
        flat[PARAM_GROUPS] = encode_value(state_dict[PARAM_GROUPS])
    return flat, {NON_TENSOR_KEYS: non_tensor} if non_tensor else None


def _unflatten_optim_state_dict(flat_dict: dict, metadata: dict | None = None, seperator: str = ".") -> dict:
    """The inverse of :func:`_flatten_optim_state_dict`: the states alone where there are no groups."""
    listed = (metadata or {}).get(NON_TENSOR_KEYS, [])
    non_tensor = set(json.loads(listed) if isinstance(listed, str) else listed)
    states: dict = {}
    for key, value in flat_dict.items():
        if key == PARAM_GROUPS:
            continue
        _, param_id, name = key.split(seperator, 2)
        entry = states.setdefault(int(param_id) if param_id.isdigit() else param_id, {})
        entry[name] = decode_value(value) if key in non_tensor else value
    if PARAM_GROUPS not in flat_dict:
        return states
    return {"state": states, PARAM_GROUPS: decode_value(flat_dict[PARAM_GROUPS])}


# -- upstream's writers ------------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None


class BackgroundFile:
    """A file that a thread writes; the tensors are the thread's own already, so they may change at once."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def sync_before_step(self) -> None:
        """Wait until the weights may change: they may at once."""

    def synchronize(self) -> None:
        """Wait until the file is on the disk; raises what the writing raised."""
        self._future.result()


def _write_file(path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    path = Path(path)
    part = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    file = SafetensorsFile(part, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, metadata)
    try:
        for name, tensor in tensors.items():
            file.put(name, tensor)
        file.close()
        os.replace(part, path)
    except BaseException:
        file.abort()
        part.unlink(missing_ok=True)
        raise


def _strings(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in (metadata or {}).items()}


def save(path: PathLike, state_dict: Mapping[str, Tensor], metadata: dict | None = None) -> BackgroundFile:
    """Write CPU tensors in a thread; they must not change before ``synchronize`` of what is returned."""
    global _pool
    _pool = _pool or ThreadPoolExecutor(1, thread_name_prefix="colossalai-safetensors")
    return BackgroundFile(_pool.submit(_write_file, path, dict(state_dict), _strings(metadata)))


def save_nested(path: PathLike, state_dict: dict) -> BackgroundFile:
    """Write an optimizer's state dict in its flat form; otherwise as :func:`save`."""
    flat, metadata = _flatten_optim_state_dict(state_dict)
    return save(path, flat, metadata)


def move_and_save(
    path: PathLike,
    state_dict: dict[str, Tensor],
    state_dict_pinned: dict[str, Tensor] | None = None,
    metadata: dict | None = None,
) -> BackgroundFile:
    """Copy the tensors, into ``state_dict_pinned`` where given, and write the copies in a thread."""
    copies = {}
    for name, tensor in state_dict.items():
        target = None if state_dict_pinned is None else state_dict_pinned.get(name)
        if target is None:
            copies[name] = tensor.detach().to("cpu", copy=True)
        else:
            copies[name] = target.copy_(tensor.detach())
    return save(path, copies, metadata)


def load_flat(checkpoint_path: PathLike, seperator: str = ".") -> dict:
    """Read an optimizer's state dict that was written in its flat form."""
    from safetensors import safe_open

    try:
        with safe_open(os.fspath(checkpoint_path), framework="pt") as file:
            flat, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
    except Exception as error:
        raise CheckpointError(f"cannot read {checkpoint_path}: {error}") from error
    return _unflatten_optim_state_dict(flat, metadata, seperator)


def names_of(keys: Iterable[str], seperator: str = ".") -> dict[int, dict[str, str]]:
    """{param id: {state name: flat key}} of the keys of a flat optimizer file."""
    table: dict[int, dict[str, str]] = {}
    for key in keys:
        if key != PARAM_GROUPS:
            _, param_id, name = key.split(seperator, 2)
            table.setdefault(int(param_id), {})[name] = key
    return table
