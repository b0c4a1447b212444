"""What importing loads and how long it takes, and life on systems that lack something."""

import subprocess
import sys

import pytest

from .conftest import ROOT

HEAVY = (
    "transformers peft ray bitsandbytes galore_torch diffusers accelerate matplotlib sklearn datasets tensornvme "
    "flash_attn apex psutil einops pydantic fabric contexttimer"
).split()


def run(code: str, **environment: str) -> str:
    import os

    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAIN = """
def train(plugin):
    from torch import nn
    from colossalai.booster import Booster
    from colossalai.nn.optimizer import HybridAdam
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))
    reference = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(12, 7), torch.randint(5, (12,))
    optimizer = HybridAdam(model.parameters(), eps=1e-3)
    plain = torch.optim.AdamW(reference.parameters(), eps=1e-3, weight_decay=0)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(nn.functional.cross_entropy(model(x), y), optimizer)
    nn.functional.cross_entropy(reference(x), y).backward()
    optimizer.step(), plain.step()
    for a, b in zip(model.unwrap().parameters(), reference.parameters()):
        assert torch.allclose(a, b, atol=1e-6), (a - b).abs().max()
"""


def test_c2_importing_and_training_load_nothing_heavy():
    """Not even where it is installed; and a machine that has only the core requirements trains."""
    out = run(f"""
import sys
HEAVY = {HEAVY!r}
class Absent:
    # every finder there was, but for what is to be absent
    finders = list(sys.meta_path)
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            tried.append(name)
            return None
        return next((spec for finder in self.finders if (spec := finder.find_spec(name, path, target))), None)
tried = []
import torch
sys.meta_path[:] = [Absent()]
import colossalai, colossalai.booster, colossalai.nn.optimizer, colossalai.cluster, colossalai.zero
import colossalai.checkpoint_io, colossalai.cli, colossalai.testing, colossalai.kernel
assert not tried, tried
{TRAIN}
colossalai.launch_from_torch(verbose=False)
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
train(TorchDDPPlugin())
train(LowLevelZeroPlugin(stage=2, precision="fp32"))
print([name for name in HEAVY if name in sys.modules])
""")
    assert out.strip().splitlines()[-1] == "[]"


def test_import_takes_no_longer_than_torch_and_a_moment():
    code = """
import time, torch
start = time.perf_counter()
import colossalai
print(time.perf_counter() - start)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_import_sets_one_variable_and_only_if_it_is_not_set():
    code = (
        "import os; before = dict(os.environ); import colossalai; "
        "print({k: v for k, v in os.environ.items() if before.get(k) != v})"
    )
    import os

    bare = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "{'CUDA_DEVICE_MAX_CONNECTIONS': '1'}", done.stderr
    assert run("import colossalai, os; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])", CUDA_DEVICE_MAX_CONNECTIONS="8") == "8\n"


def test_c6_imports_and_trains_where_unix_is_missing():
    """A stand-in for Windows: the platform's name, and no module that only Unix has."""
    run(f"""
import sys, torch, torch.distributed, torch.utils.data, torch.distributed.fsdp
import multiprocessing, subprocess, tempfile, asyncio, socket, ctypes, random, uuid, inspect  # Windows has its own
import click, numpy, packaging.version, rich.console, safetensors.torch, tqdm
UNIX = ("resource", "fcntl", "pwd", "grp", "termios", "posix", "pty", "syslog")
for name in UNIX:
    sys.modules.pop(name, None)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.platform = "win32"
import colossalai, colossalai.cli, colossalai.kernel, colossalai.testing
from colossalai.accelerator import CpuAccelerator
assert CpuAccelerator().max_memory_reserved() == 0
try:
    CpuAccelerator().set_per_process_memory_fraction(0.5)
except RuntimeError as error:
    assert "cannot limit" in str(error)
{TRAIN}
colossalai.launch_from_torch(backend="gloo", verbose=False)
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
train(TorchDDPPlugin())
train(LowLevelZeroPlugin(stage=1, precision="fp32"))
""")


def test_c6_metadata_on_windows_is_fine_and_a_native_build_is_refused(source, builder):
    """``setup.py`` under the name of Windows: the metadata stage works, building native code says why not."""
    from .conftest import build

    fake = source / "fake_windows.py"
    fake.write_text(
        "import sys, setuptools, setuptools.build_meta as b\n"
        "import setuptools.command.build_ext, setuptools.command.bdist_wheel\n"
        "sys.platform = 'win32'\n"
        "hook, out = sys.argv[1:]\n"
        "sys.argv[1:] = []\n"
        "print('made', getattr(b, hook)(out))\n"
    )
    (source / "out").mkdir()
    for flag in ("0", "1"):
        done = builder.run(str(fake), "prepare_metadata_for_build_wheel", "out", cwd=source, BUILD_EXT=flag)
        assert "made colossalai" in done.stdout
    done = builder.run(str(fake), "build_wheel", "out", cwd=source, BUILD_EXT="0")
    assert done.stdout.strip().endswith("py3-none-any.whl")
    done = builder.run(str(fake), "build_wheel", "out", cwd=source, check=False, BUILD_EXT="1")
    assert done.returncode != 0 and "Windows" in done.stderr and "unset BUILD_EXT" in done.stderr
    assert build(builder, source, "build_wheel", source / "again").name.endswith("py3-none-any.whl")


@pytest.mark.gpu
def test_import_does_not_start_cuda():
    assert run("import torch, colossalai, colossalai.booster; print(torch.cuda.is_initialized())") == "False\n"
