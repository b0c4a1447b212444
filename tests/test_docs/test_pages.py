"""Every code block of the documentation runs (field case C87)."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.fresh import run_fresh

from .pages import PAGES, ROOT, parse

SECONDS = 120


def run_script(path: str) -> None:
    os.chdir(os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(procs: int) -> list[dict[str, str]]:
    """What each process of a script finds in its environment."""
    common = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    if procs == 1:
        return [common]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(procs)}
    return [{**common, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(procs)]


@pytest.fixture
def shell_environment(tmp_path):
    """Shell blocks find this tree's package, this Python, and ``colossalai`` and ``torchrun`` even if not installed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    modules = {"colossalai": "colossalai.cli", "torchrun": "torch.distributed.run", "pytest": "pytest"}
    for name, module in modules.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return {**os.environ, **environments(1)[0], "PYTHONPATH": search, "PATH": path}


def not_done(results: list) -> list:
    return [result for result in results if result is not None]


@pytest.mark.limit(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_c87_blocks_of_a_page_run(page: Path, tmp_path, shell_environment):
    work = parse(page.read_text(encoding="utf-8"))
    folder = tmp_path / "page"
    folder.mkdir()
    for name, text in work.files.items():
        (folder / name).write_text(text)
    for number, script in enumerate(work.scripts):
        path = folder / f"{page.stem}_{number}.py"
        path.write_text(script.text)
        results = run_fresh([(run_script, {"path": str(path)}, env) for env in environments(script.procs)], SECONDS)
        assert not not_done(results), f"{page.name}: {not_done(results)}"
    for block in work.shell:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder,
            env=shell_environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{page.name}, line {block.line}:\n{done.stdout}\n{done.stderr}"


def test_every_python_block_compiles_and_every_block_is_declared():
    for page in PAGES:
        work = parse(page.read_text(encoding="utf-8"))
        for name, text in work.files.items():
            compile(text, f"{page.name}:{name}", "exec")
        for script in work.scripts:
            compile(script.text, str(page), "exec")


def test_a_block_that_fails_is_seen(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(parse("<!-- run -->\n```python\nassert 1 == 2\n```\n").scripts[0].text)
    results = run_fresh([(run_script, {"path": str(path)}, environments(1)[0])], SECONDS)
    assert "AssertionError" in not_done(results)[0][0]


@pytest.mark.parametrize(
    "text, message",
    [
        ("```python\nx = 1\n```\n", "needs <!-- run -->"),
        ("```sh\nls\n```\n", "line 2: a block is python, bash, text, not 'sh'"),
        ("```\nls\n```\n", "not ''"),
        ("<!-- run: procs=2 size=3 -->\n```python\nx = 1\n```\n", "unknown option size"),
    ],
)
def test_a_block_nobody_would_run_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_blocks_are_joined_in_order_and_keep_their_line_numbers():
    text = "# T\n\n<!-- run: procs=2 -->\n```python\na = 1\n```\n\nmore\n\n```python\nb = a\n```\n"
    text += "<!-- run -->\n```python\nc = 2\n```\n"
    first, second = parse(text).scripts
    assert (first.procs, second.procs) == (2, 1)
    assert first.text.splitlines()[4] == "a = 1" and first.text.splitlines()[10] == "b = a"
    assert "c" not in first.text and second.text.strip() == "c = 2"
