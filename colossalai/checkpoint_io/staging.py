"""Nothing half-written is ever taken for a checkpoint.

[Note: how a checkpoint becomes visible]
A single file is written under a temporary name in its own directory, forced to the disk, and renamed: the old file is
whole until the new one is. A directory of shards cannot be renamed as one, since other files live in it. So:

    1. shards, configuration and index are written into a hidden directory inside the target directory, and forced to
       disk
    2. a journal that lists them is put beside the index: from here on the new checkpoint is complete, only not in place
    3. the old index is removed, shards are renamed into place, old shards that no longer belong are removed, the new
       index is renamed into place, the journal is removed

Killed in 1, the old checkpoint is untouched. Killed in 3, whoever comes next (a load or a save) finishes step 3 from
the journal; a reader that knows nothing of journals finds no index rather than shards of two different steps.
"""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from colossalai.utils.errors import CheckpointError

_STAGING_PREFIX = ".saving-"
_JOURNAL_PREFIX = ".publish-"
# Tells this process's files from those of a dead one with the same number, as restarted containers have.
_SESSION = secrets.token_hex(4)
# How long a load waits for another process that is just renaming files.
PUBLISH_SECONDS = 60.0
# A leftover of another host is a dead one's when nobody touched it for so long.
STALE_SECONDS = 24 * 3600.0


def sync_directory(directory: Path) -> None:
    """Force a directory's entries to the disk, where the system can (Windows cannot)."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _label() -> str:
    """Says who wrote it: host, process number, process, and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{_SESSION}.{secrets.token_hex(4)}"


def _is_own(path: Path) -> bool:
    return f"-{os.getpid()}-{_SESSION}." in path.name


def _is_dead(path: Path) -> bool:
    """Whether the writer of a leftover, named by its label, is gone."""
    if _is_own(path):
        return False
    host, _, number = path.name.rpartition("-")[0].rpartition("-")
    if host.endswith(socket.gethostname()) and number.isdigit():
        if int(number) == os.getpid():
            return True
        if os.name == "nt":  # there, signal 0 ends a process
            return _is_old(path)
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False
    return _is_old(path)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except OSError:
        return False


def sweep(directory: Path, prefix: str) -> None:
    """Remove what killed processes left under names that start with ``prefix``."""
    for leftover in directory.glob(f"{glob_escape(prefix)}*"):
        if _is_dead(leftover):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def glob_escape(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


class SingleFile:
    """One file being written: :meth:`path` gives where, :meth:`publish` puts it in place."""

    def __init__(self, target: Path) -> None:
        if target.is_dir():
            raise CheckpointError(f"{target} is a directory: give the path of a file, or save with shard=True")
        if not target.parent.is_dir():
            raise CheckpointError(f"{target}: the directory {target.parent} does not exist")
        self.target = target
        self._prefix = f".{target.name}.tmp-"
        sweep(target.parent, self._prefix)
        self._part = target.with_name(self._prefix + _label())

    def path(self, name: str) -> Path:
        return self._part

    def publish(self) -> None:
        _sync_file(self._part)
        os.replace(self._part, self.target)
        sync_directory(self.target.parent)

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)


class Staging:
    """The files of one sharded checkpoint being written; see the note above.

    Args:
        directory: where they will be; made where it does not exist.
        index_name: the file that makes the others a checkpoint; it is published last.
    """

    def __init__(self, directory: Path, index_name: str) -> None:
        self.directory, self.index_name = directory, index_name
        directory.mkdir(parents=True, exist_ok=True)
        recover(directory)
        sweep(directory, _STAGING_PREFIX)
        self._folder = directory / (_STAGING_PREFIX + _label())
        self._folder.mkdir()

    def path(self, name: str) -> Path:
        """Where to write the file that will be called ``name``; give the folder itself for the empty name."""
        return self._folder / name if name else self._folder

    def publish(self, stale: Iterable[str] = (), renames: dict[str, str] | None = None) -> None:
        """Put everything in place.

        Args:
            stale: names in the directory that belong to the old checkpoint only.
            renames: {old name: new name} of files that must not be read as part of the new checkpoint.
        """
        paths = [path for path in self._folder.rglob("*") if path.is_file()]
        files = sorted(path.relative_to(self._folder).as_posix() for path in paths)
        for path in paths:
            _sync_file(path)
        sync_directory(self._folder)
        journal = self.directory / f"{_JOURNAL_PREFIX}{self.index_name}"
        entry = {
            "folder": self._folder.name,
            "index": self.index_name,
            "files": files,
            "stale": sorted(set(stale) - set(files)),
            "renames": renames or {},
        }
        part = self._folder / "journal"
        part.write_text(json.dumps(entry))
        _sync_file(part)
        os.replace(part, journal)
        sync_directory(self.directory)
        (self.directory / self.index_name).unlink(missing_ok=True)
        _carry_out(self.directory, journal, entry)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError:  # Windows refuses on a file opened for reading
            pass


def _move(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
        os.replace(source, target)
    except FileNotFoundError:  # done before
        pass


def _carry_out(directory: Path, journal: Path, entry: dict) -> None:
    """Step 3; every part may have been done before, and by another process at the same time."""
    folder = directory / entry["folder"]
    for old, new in entry["renames"].items():
        _move(directory / old, directory / new)
    for name in entry["files"]:
        if name != entry["index"]:
            _move(folder / name, directory / name)
    for name in entry["stale"]:
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
    _move(folder / entry["index"], directory / entry["index"])
    sync_directory(directory)
    journal.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def recover(directory: Path) -> None:
    """Finish what a killed process began to publish here; waits for one that is alive.

    Raises:
        CheckpointError: where the files cannot be renamed, or a living process does not finish.
    """
    deadline = time.monotonic() + PUBLISH_SECONDS
    for journal in directory.glob(f"{_JOURNAL_PREFIX}*"):
        while True:
            try:
                entry = json.loads(journal.read_text())
            except FileNotFoundError:
                break  # the other process finished
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot read {journal}: {error}; remove it if no save is running") from error
            folder = directory / entry["folder"]
            if folder.exists() and not _is_dead(folder) and time.monotonic() < deadline and not _is_own(folder):
                time.sleep(0.05)
                continue
            try:
                _carry_out(directory, journal, entry)
            except OSError as error:
                raise CheckpointError(
                    f"the last save into {directory} was killed while its files were renamed, and finishing it failed: {error}"
                ) from error
            break
