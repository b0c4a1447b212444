"""Copies of the source tree and environments to install it into."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])


@dataclass(frozen=True)
class Python:
    """An interpreter of its own and how to run it."""

    exe: Path
    site: Path
    path: str | None = None
    """PATH; None keeps the one of the tests."""

    def run(self, *args: str, cwd: Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        """Run it outside the checkout. With ``check`` a failure shows what was printed."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "BUILD_EXT", "PYTHONHOME", "VIRTUAL_ENV")}
        env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "MAX_JOBS": "1"} | environment
        if self.path is not None:
            env["PATH"] = self.path
        done = subprocess.run([str(self.exe), *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 or not check, f"{args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done


def make_python(folder: Path, *, sees: list[Path] = (), path: str | None = None) -> Python:
    """A virtual environment without pip that sees these folders too, after its own packages."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    exe = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "Lib" / "site-packages" if os.name == "nt" else folder / "lib" / version / "site-packages"
    (site / "seen.pth").write_text("".join(f"{one}\n" for one in sees), encoding="utf-8")
    return Python(exe, site, path)


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy of the checkout as git would give it: nothing built, no version.py."""
    copy = tmp_path_factory.mktemp("source") / "colossalai-source"
    copy.mkdir()
    for name in ("colossalai", "extensions", "requirements"):
        shutil.copytree(
            ROOT / name,
            copy / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "version.py", "*.egg-info"),
        )
    for name in ("setup.py", "pyproject.toml", "version.txt", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def source(tree, tmp_path) -> Path:
    """A copy of the checkout of one's own, to build in."""
    return Path(shutil.copytree(tree, tmp_path / "source"))


@pytest.fixture(scope="session")
def builder(tmp_path_factory) -> Python:
    """What an isolated build gets: setuptools and nothing else. No torch, no compiler."""
    parts = tmp_path_factory.mktemp("setuptools")
    import setuptools

    shutil.copytree(Path(setuptools.__file__).parent, parts / "setuptools", ignore=shutil.ignore_patterns("tests"))
    for name in ("_distutils_hack", "pkg_resources"):
        if (SITE / name).is_dir():
            shutil.copytree(SITE / name, parts / name, ignore=shutil.ignore_patterns("tests"))
    for info in SITE.glob("setuptools-*.dist-info"):
        shutil.copytree(info, parts / info.name)
    return make_python(tmp_path_factory.mktemp("builder") / "env", sees=[parts], path="")


def build(python: Python, source: Path, hook: str, out: Path, check: bool = True, **environment: str):
    """Call a hook of the build backend, as pip does: ``build_wheel`` or ``build_sdist``. The file it made."""
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; print('made', b.{hook}({str(out)!r}))"
    done = python.run("-c", code, cwd=source, check=check, **environment)
    if done.returncode:
        return done
    return out / done.stdout.rsplit("made ", 1)[1].strip()


@pytest.fixture(scope="session")
def wheel(tree, builder, tmp_path_factory) -> Path:
    """The wheel of the default build."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(builder, Path(shutil.copytree(tree, folder / "source")), "build_wheel", folder / "out")


@pytest.fixture(scope="session")
def sdist(tree, builder, tmp_path_factory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    return build(builder, Path(shutil.copytree(tree, folder / "source")), "build_sdist", folder / "out")
