"""How the files of a checkpoint are called, and finding the one that is meant."""

import re
from pathlib import Path

from colossalai.utils.errors import CheckpointError, ConfigError

from .staging import recover

PathLike = str | Path

SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
STATES_NAME = "pytorch_optim.bin"
SAFE_STATE_NAME = "optimizer.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
STATES_INDEX_NAME = "pytorch_optim.bin.index.json"
SAFE_STATES_INDEX_NAME = "optimizer.safetensors.index.json"
GROUP_FILE_NAME = "pytorch_optim_group.bin"
EXTRA_FILE_NAME = "pytorch_optim_extra.bin"
"""What the optimizer has beside states and groups (the loss scaler); only where there is such a thing."""

_INDEX_PATTERN = re.compile(r".*\.index.*\.json$")


def add_prefix(weights_name: str, prefix: str | None = None) -> str:
    """``pytorch_model.bin`` with the infix ``prefix``: ``pytorch_model.<prefix>.bin``."""
    if not prefix:
        return weights_name
    stem, _, extension = weights_name.rpartition(".")
    return f"{stem}.{prefix}.{extension}"


def get_model_base_filenames(prefix: str | None = None, use_safetensors: bool = False) -> tuple[str, str]:
    """(weights, index) names of a sharded model."""
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if use_safetensors else (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    return tuple(add_prefix(name, prefix) for name in names)


def get_optimizer_base_filenames(prefix: str | None = None, use_safetensors: bool = False) -> tuple[str, str, str]:
    """(states, index, param groups) names of a sharded optimizer."""
    names = (SAFE_STATE_NAME, SAFE_STATES_INDEX_NAME) if use_safetensors else (STATES_NAME, STATES_INDEX_NAME)
    return tuple(add_prefix(name, prefix) for name in (*names, GROUP_FILE_NAME))


def get_shard_filename(weights_name: str, idx: int) -> str:
    """Name of shard ``idx``, counted from 0: ``pytorch_model-00001.bin`` for the first."""
    stem, _, extension = weights_name.rpartition(".")
    return f"{stem}-{idx + 1:05d}.{extension}"


def shard_pattern(weights_name: str, use_pp_format: bool = False) -> re.Pattern:
    """Matches the numbered shards of ``weights_name``: ours, and Hugging Face's ``-00001-of-00002``."""
    stem, _, extension = weights_name.rpartition(".")
    number = r"-stage-\d{5}(?:-\d{5})?-shard-\d{5}" if use_pp_format else r"-\d{5}(?:-of-\d{5})?"
    return re.compile(rf"{re.escape(stem)}{number}\.{re.escape(extension)}")


def find_indices(directory: Path) -> list[Path]:
    """The index files in a directory, sorted."""
    return sorted(path for path in directory.iterdir() if path.is_file() and re.fullmatch(r".*\.index\..*json", path.name))


def has_index_file(checkpoint_path: PathLike) -> tuple[bool, Path | None]:
    """Whether ``checkpoint_path`` is, or is a directory with, the index of a sharded checkpoint; and which.

    Raises:
        ConfigError: where a directory has more than one.
    """
    path = Path(checkpoint_path)
    if path.is_file():
        return (True, path) if _INDEX_PATTERN.fullmatch(path.name) else (False, None)
    if not path.is_dir():
        return False, None
    recover(path)
    found = find_indices(path)
    if len(found) > 1:
        raise ConfigError(
            f"{path} has {len(found)} index files ({', '.join(index.name for index in found)}): keep model and "
            "optimizer in different directories, or give the path of the index file itself"
        )
    return (True, found[0]) if found else (False, None)


def locate_model(checkpoint: PathLike) -> tuple[bool, Path]:
    """(whether sharded, path of the index or of the single file) of a model's checkpoint.

    Raises:
        CheckpointError: where there is none.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist")
    sharded, index = has_index_file(path)
    if sharded:
        return True, index
    if not path.is_dir():
        return False, path
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (path / name).is_file():
            return False, path / name
    raise CheckpointError(
        f"{path} has no model: expected an index file (*.index.json), {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} in it"
    )


def locate_optimizer(checkpoint: PathLike, prefix: str | None = None) -> tuple[bool, Path]:
    """(whether sharded, path of the index or of the single file) of an optimizer's checkpoint.

    Args:
        prefix: of the shards; picks one index of a directory that has several.

    Raises:
        CheckpointError: where the path does not exist.
        ConfigError: for a directory without an index.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if prefix and path.is_dir():
        recover(path)
        named = [path / get_optimizer_base_filenames(prefix, safe)[1] for safe in (False, True)]
        found = [index for index in named if index.is_file()]
        if not found:
            raise ConfigError(f"prefix={prefix!r}: {path} has neither {named[0].name} nor {named[1].name}")
        return True, found[0]
    sharded, index = has_index_file(path)
    if path.is_dir() and not sharded:
        raise ConfigError(f"{path} has no index file (*.index.json) of a sharded optimizer")
    return (True, index) if sharded else (False, path)
