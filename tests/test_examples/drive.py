"""Runs the scripts of an example: in the ranks of a worker pool, or as its users start them."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "language" / "llama"


def run_in_rank(rank: int, world_size: int, script: str, argv: list[str], helpers: list[str]) -> int | str | None:
    """``script`` with ``argv`` in this rank, which stays in its world; returns the code of a SystemExit, else None."""
    import torch.distributed

    with (
        mock.patch.object(sys, "argv", [script, *argv]),
        mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
        mock.patch.object(torch.distributed, "destroy_process_group"),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            return stop.code
        finally:
            for name in helpers:  # they have everyday names, which other scripts' helpers may share
                sys.modules.pop(name, None)
    return None


def helpers_of(script: Path) -> list[str]:
    return [path.stem for path in script.parent.glob("*.py")]


def start(command: list[str], timeout: float, **environment: str) -> str:
    """Run a command from the root as a user does; returns what it printed, fails with it on a non-zero exit."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
