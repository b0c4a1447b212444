"""Installed from the wheel, the source distribution and in place: it imports, knows its version and trains."""

import subprocess
import sys

import pytest
import torch

from .conftest import ROOT, SITE, make_python

pytestmark = pytest.mark.limit(240)

VERSION = (ROOT / "version.txt").read_text(encoding="utf-8").strip()

TRAIN = """
import sys, torch
from torch import nn
import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from importlib.metadata import entry_points, version

colossalai.launch_from_torch(verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))
before = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(12, 7), torch.randint(5, (12,))
expected = nn.functional.cross_entropy(model(x), y)
gradients = torch.autograd.grad(expected, list(model.parameters()))
booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
model, optimizer, *_ = booster.boost(model, optimizer)
loss = nn.functional.cross_entropy(model(x), y)
booster.backward(loss, optimizer)
optimizer.step()
for p, start, gradient in zip(model.unwrap().parameters(), before, gradients):
    assert torch.allclose(p, start - 0.1 * gradient, atol=1e-6)
import colossalai.kernel.extensions as extensions
from pathlib import Path
native = sorted(path.name for path in Path(extensions.__file__).parent.glob("csrc/**/*") if path.is_file())
script = [e for e in entry_points(group="console_scripts") if e.name == "colossalai"][0].load()
print("RESULT", colossalai.__version__, colossalai.version.__version__, version("colossalai"), len(native) > 0,
      callable(script), colossalai.__file__)
"""


def install(python, what: str, cwd) -> None:
    """``pip install`` into another environment: with the requirements checked, and no index to fetch anything from."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python.exe), "install", "--no-index",
         "--no-build-isolation", "-q", *what.split()],
        cwd=cwd, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def python(tmp_path):
    """An environment that sees this one's packages (torch too), so that nothing has to be fetched."""
    pytest.importorskip("pip")
    return make_python(tmp_path / "env", sees=[SITE])


def train_in(python, tmp_path) -> list[str]:
    out = python.run("-c", TRAIN, cwd=tmp_path).stdout
    return out.rsplit("RESULT ", 1)[1].split()


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_c1_installs_beside_the_users_torch_and_trains(kind, python, request, source, tmp_path):
    if kind == "editable":
        install(python, "-e .", source)
    else:
        install(python, str(request.getfixturevalue(kind)), tmp_path)
    *versions, native, script, file = train_in(python, tmp_path)
    assert versions == [VERSION] * 3 and (native, script) == ("True", "True")
    assert file.startswith(str(source if kind == "editable" else python.site))
    torch_there = python.run("-c", "import torch; print(torch.__version__, torch.__file__)", cwd=tmp_path).stdout.split()
    assert torch_there == [torch.__version__, torch.__file__]
    conflicts = subprocess.run([sys.executable, "-m", "pip", "--python", str(python.exe), "check"], capture_output=True, text=True)
    assert "colossalai" not in conflicts.stdout + conflicts.stderr


def test_a_checkout_that_was_never_built_knows_its_version(source, tmp_path):
    python = make_python(tmp_path / "env", sees=[SITE])
    assert not (source / "colossalai" / "version.py").exists()
    code = "import colossalai; from colossalai.version import __version__; print(colossalai.__version__, __version__)"
    assert python.run("-c", code, cwd=source).stdout.split() == [VERSION, VERSION]
    (source / "version.txt").write_text("9.8.7\n")
    (source / "colossalai" / "version.py").write_text('__version__ = "1.0.0"\n')  # left by an older build
    assert python.run("-c", code, cwd=source).stdout.split() == ["9.8.7", "9.8.7"]


def test_an_incomplete_copy_says_so(source, tmp_path):
    python = make_python(tmp_path / "env", sees=[SITE])
    (source / "version.txt").unlink()
    done = python.run("-c", "import colossalai", cwd=source, check=False)
    assert done.returncode != 0 and "not complete" in done.stderr
