"""What is in the wheel and the source distribution, and what they ask for."""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from .conftest import ROOT, build

CORE = {"torch", "numpy", "packaging", "safetensors", "click", "rich", "tqdm"}
VERSION = (ROOT / "version.txt").read_text(encoding="utf-8").strip()


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_c4_default_wheel_is_pure_without_torch_or_compiler(wheel):
    """Built by an environment that holds setuptools and nothing else, with an empty PATH."""
    assert wheel.name == f"colossalai-{VERSION}-py3-none-any.whl"


def test_c1_metadata_takes_the_users_torch(metadata):
    assert metadata["Version"] == VERSION and metadata["Name"] == "colossalai"
    assert metadata["Requires-Python"] == ">=3.10"
    assert [line for line in metadata.get_all("Requires-Dist") if re.match(r"torch\b", line)] == ["torch>=2.11"]
    from packaging.specifiers import SpecifierSet

    spec = SpecifierSet(metadata["Requires-Python"])
    assert all(f"3.{minor}" in spec for minor in (10, 11, 12, 13)) and "3.9" not in spec


def test_c2_core_requirements_are_few_and_have_no_cap(metadata):
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    core = {one.name for one in needed if one.marker is None}
    assert core == CORE
    for one in needed:
        assert {part.operator for part in one.specifier} <= {">="}, f"{one} has an upper cap"
        assert one.url is None


def test_extras(metadata):
    from packaging.requirements import Requirement

    def extra(name):
        needed = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
        return {one.name for one in needed if one.marker and one.marker.evaluate({"extra": name})}

    assert {"hf", "plot", "test", "dev", "docs"} <= set(metadata.get_all("Provides-Extra"))
    assert extra("hf") == {"transformers", "peft"} and extra("plot") == {"matplotlib"} and extra("docs") == {"mkdocs"}
    assert {"pytest", "hypothesis"} <= extra("test") <= extra("dev")


def test_license(metadata):
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def sources() -> set[str]:
    return {
        path.relative_to(ROOT / "extensions").as_posix()
        for path in (ROOT / "extensions").rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".cu")
    }


def test_wheel_carries_the_package_the_command_and_the_native_sources(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        version = archive.read("colossalai/version.py").decode()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "colossalai").rglob("*.py")}
    assert modules - {"colossalai/version.py"} <= names
    assert {f"colossalai/kernel/extensions/{name}" for name in sources()} <= names
    assert not [name for name in names if name.startswith(("tests/", "extensions/")) or name.endswith((".so", ".pyc"))]
    assert "colossalai = colossalai.cli:cli" in scripts
    assert f'__version__ = "{VERSION}"' in version


def test_sdist_carries_everything_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.split("/", 1)[1] for member in members if "/" in member.name}
    assert {"setup.py", "pyproject.toml", "version.txt", "LICENSE", "requirements/requirements.txt"} <= names
    assert {f"extensions/{name}" for name in sources()} <= names
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert sdist.name == f"colossalai-{VERSION}.tar.gz"


@pytest.mark.parametrize("value", ["maybe", "2", "yes please"])
def test_c4_build_ext_is_read_strictly(source, builder, value):
    done = build(builder, source, "build_wheel", source / "out", check=False, BUILD_EXT=value)
    assert done.returncode != 0
    assert f"BUILD_EXT={value!r} is neither on (1, true, yes, on) nor off (0, false, no, off or unset)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["0", "False", "no", "OFF", ""])
def test_c4_build_ext_off(source, builder, value):
    assert build(builder, source, "build_wheel", source / "out", BUILD_EXT=value).name.endswith("py3-none-any.whl")


def test_pip_itself_builds_the_same_wheel(source, tmp_path):
    pytest.importorskip("pip")
    from .conftest import Python

    here = Python(Path(sys.executable), Path())
    here.run("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path / "out"), cwd=source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"colossalai-{VERSION}-py3-none-any.whl"]
