"""The index of a sharded checkpoint: which tensor is in which file."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from colossalai.utils.errors import CheckpointError, ConfigError

from .staging import SingleFile

PathLike = str | Path


class CheckpointIndexFile:
    """``{"metadata": {...}, "weight_map": {key: file}}``; file names are relative to ``root_path``.

    Args:
        root_path: directory of the files.
    """

    def __init__(self, root_path: PathLike | None = None) -> None:
        self.root_path: Path | None = None if root_path is None else Path(root_path)
        self.metadata: dict[str, Any] = {}
        self.weight_map: dict[Any, str] = {}

    @staticmethod
    def from_file(index_path: PathLike) -> "CheckpointIndexFile":
        """Read an index; its directory becomes ``root_path``."""
        index = CheckpointIndexFile()
        index.load(index_path)
        return index

    def load(self, json_path: PathLike) -> None:
        """Replace the contents by those of a file.

        Raises:
            CheckpointError: where it is missing, or no index.
        """
        path = Path(json_path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            weight_map = dict(content["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read the index {path}: {type(error).__name__}: {error}") from error
        self.root_path = path.absolute().parent
        self.metadata, self.weight_map = dict(content.get("metadata") or {}), weight_map

    def export(self, json_path: PathLike) -> None:
        """Write the contents to a path of your own; see :meth:`write_index_file` for the place beside the shards."""
        self._write(Path(json_path), indent=4, end="")

    def write_index_file(self, save_index_file: str) -> None:
        """Write the contents to the name ``save_index_file`` under ``root_path``."""
        if self.root_path is None:
            raise ConfigError("write_index_file needs root_path: construct CheckpointIndexFile(root_path=...)")
        self._write(self.root_path / save_index_file, indent=2, end="\n")

    def _write(self, path: Path, indent: int, end: str) -> None:
        content = OrderedDict(metadata=self.metadata, weight_map=self.weight_map)
        file = SingleFile(path)
        try:
            file.path(path.name).write_text(json.dumps(content, indent=indent) + end, encoding="utf-8")
            file.publish()
        except OSError as error:
            file.discard()
            raise CheckpointError(f"cannot write the index {path}: {error}") from error

    def append_weight_map(self, param_name: Any, shard_file: str) -> None:
        self.weight_map[param_name] = shard_file

    def append_meta_data(self, name: str, val: Any) -> None:
        self.metadata[name] = val

    def contains_dtensor(self) -> bool:
        """Whether a file holds pieces of distributed tensors (written by Colossal-AI before 0.4)."""
        return any("dtensor" in name.split(".") for name in self.weight_map.values())

    def get_checkpoint_filenames(self) -> tuple[list[str], list[str]]:
        """(files, files of distributed tensors): absolute, sorted, each once."""
        names = sorted(set(self.weight_map.values()))
        paths = [(name, str(self._path(name))) for name in names]
        pieces = [path for name, path in paths if "dtensor" in name.split(".")]
        return [path for name, path in paths if "dtensor" not in name.split(".")], pieces

    def _path(self, name: str) -> Path:
        return Path(name) if self.root_path is None else self.root_path / name

    def assert_no_dtensor_checkpoint(self) -> None:
        """Raises ConfigError (a ValueError) where :meth:`contains_dtensor`."""
        if self.contains_dtensor():
            raise ConfigError(f"{self.root_path} holds pieces of distributed tensors: join them with the tool that wrote them")

    def get_checkpoint_file(self, param_name: Any) -> str:
        """Absolute path of the file that holds ``param_name``."""
        return str(self._path(self.weight_map[param_name]))

    def get_all_param_names(self) -> list:
        return list(self.weight_map)

    def get_param_group_filename(self) -> str | None:
        """Path of the file of param groups, None where the index names none."""
        name = self.metadata.get("param_groups")
        return None if name is None else str(self._path(name))
