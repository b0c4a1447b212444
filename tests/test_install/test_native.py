"""BUILD_EXT=1: what it builds, and the one reason it gives where it cannot."""

import shutil
import zipfile

import pytest

from .conftest import SITE, build, make_python

pytestmark = pytest.mark.limit(280)


def test_c4_without_torch_it_names_torch(source, builder, tmp_path):
    python = make_python(tmp_path / "env", sees=[next(iter(seen(builder)))])
    done = build(python, source, "build_wheel", source / "out", check=False, BUILD_EXT="1")
    assert done.returncode != 0
    assert "BUILD_EXT is on and needs torch in the environment" in done.stderr
    assert "--no-build-isolation" in done.stderr and "Traceback" not in done.stderr


def test_c4_without_a_compiler_it_names_the_compiler(source, tmp_path):
    python = make_python(tmp_path / "env", sees=[SITE], path="")
    done = build(python, source, "build_wheel", source / "out", check=False, BUILD_EXT="yes", CXX="")
    assert done.returncode != 0
    assert "no C++ compiler: c++, g++, clang++ cannot be found on PATH" in done.stderr
    assert "unset BUILD_EXT" in done.stderr and "Traceback" not in done.stderr


def test_c4_metadata_needs_no_compiler(source, tmp_path):
    python = make_python(tmp_path / "env", sees=[SITE], path="")
    made = build(python, source, "prepare_metadata_for_build_wheel", source / "out", BUILD_EXT="1")
    assert (made / "METADATA").is_file()


USE = """
import torch
import colossalai
from colossalai.kernel.kernel_loader import CPUAdamLoader
loader = CPUAdamLoader()
kernel = loader.load_if_built()
assert kernel is loader.load()
p, m, v = torch.ones(5), torch.zeros(5), torch.zeros(5)
q = torch.nn.Parameter(p.clone())
q.grad = torch.arange(5.0)
torch.optim.AdamW([q], lr=0.1, weight_decay=0.5).step()
kernel.CPUAdamOptimizer(0.1, 0.9, 0.999, 1e-8, 0.5).step(1, 0.1, 0.9, 0.999, 1e-8, 0.5, True, p, q.grad, m, v)
assert torch.allclose(p, q, atol=1e-6), (p, q)
import colossalai._C, pathlib
print("RESULT", *[path.name for path in pathlib.Path(colossalai._C.__file__).parent.glob("*.so")])
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_build_ahead_of_time(source, tmp_path):
    python = make_python(tmp_path / "env", sees=[SITE])
    wheel = build(python, source, "build_wheel", source / "out", BUILD_EXT="1")
    assert not wheel.name.endswith("none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        built = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(built) == 1 and built[0].startswith("colossalai/_C/cpu_adam_")
        archive.extractall(python.site)
    # The cache for builds just in time is elsewhere and empty: what is loaded is what the wheel brought.
    empty = tmp_path / "empty"
    out = python.run("-c", USE, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(empty)).stdout
    assert out.split()[-1] == built[0].rsplit("/", 1)[1] and not empty.exists()


def seen(python) -> list[str]:
    return (python.site / "seen.pth").read_text().split()
