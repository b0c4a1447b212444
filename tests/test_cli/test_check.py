"""``colossalai check``: what the report says, and that it says the truth."""

import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from colossalai.cli import cli
from colossalai.cli.check import installation
from colossalai.cli.check.installation import Extension, Versions, installation_report, same, state_of, system_cuda


def row(report, label):
    return re.search(rf"^{re.escape(label)}:\s+(.*)$", report, re.M)[1]


def test_report_states_the_versions_in_use():
    import torch

    import colossalai

    result = CliRunner().invoke(cli, ["check", "-i"])
    assert result.exit_code == 0, result.output
    assert row(result.output, "Colossal-AI version") == colossalai.__version__
    assert row(result.output, "PyTorch version") == torch.__version__
    assert row(result.output, "CUDA version required by PyTorch") == (torch.version.cuda or "N/A")
    assert re.search(r"^cpu_adam_x86 +(built|compatible|absent) +\w", result.output, re.M)
    assert re.search(r"^cpu_adam_arm +(built|compatible|absent) +\w", result.output, re.M)


def test_without_option_it_says_which_there_is():
    result = CliRunner().invoke(cli, ["check"])
    assert result.exit_code == 0 and "No option is given" in result.output


def test_a_native_build_that_does_not_fit_is_seen(monkeypatch):
    found = Versions("0.6.0+torch2.12cu12.8", "2.13.0", "13.0", "12.8", "2.12", "12.8")
    monkeypatch.setattr(installation, "find_versions", lambda: found)
    kernels = [Extension("fused_optim_cuda", "built", "ahead of time (BUILD_EXT=1)")]
    monkeypatch.setattr(installation, "find_extensions", lambda: kernels)
    report = installation_report()
    assert row(report, "Found AOT CUDA Extension") == "✓"
    assert row(report, "PyTorch version match") == "x"
    assert row(report, "System and PyTorch CUDA version match") == "x"
    assert row(report, "System and Colossal-AI CUDA version match") == "✓"
    monkeypatch.setattr(installation, "find_extensions", lambda: [Extension("fused_optim_cuda", "absent", "no nvcc")])
    assert row(installation_report(), "Found AOT CUDA Extension") == "x"


def test_versions_are_compared_by_major_and_minor():
    assert same("2.13.0+cpu", "2.13") == "✓"
    assert same("2.13.1", "2.12.1") == "x"
    assert same(None, "2.13") == same("2.13", None) == "N/A"


def fake(available=True, built=None, missing=None, jit=True):
    def raises(error):
        raise error

    return SimpleNamespace(
        name="k",
        support_jit=jit,
        is_available=lambda: available,
        find_built=lambda: raises(built) if isinstance(built, Exception) else built,
        assert_compatible=lambda: raises(missing) if missing else None,
    )


@pytest.mark.parametrize(
    "extension, state, why",
    [
        (fake(built=SimpleNamespace(__name__="colossalai._C.k")), "built", "ahead of time"),
        (fake(built=SimpleNamespace(__name__="k")), "built", "just in time"),
        (fake(), "compatible", "at its first use"),
        (fake(jit=False), "compatible", "BUILD_EXT=1"),
        (fake(missing=RuntimeError("no nvcc\nat all")), "absent", "no nvcc"),
        (fake(available=False, missing=RuntimeError("k is for arm")), "absent", "k is for arm"),
        (fake(available=False), "absent", "hardware"),
        (fake(built=ImportError("undefined symbol")), "absent", "cannot be loaded: undefined symbol"),
    ],
)
def test_each_state_of_an_extension_has_its_reason(monkeypatch, extension, state, why):
    monkeypatch.setattr(installation, "_require_compiler", lambda: None)
    found = state_of(extension)
    assert found.state == state and why in found.why and "\n" not in found.why


def test_no_compiler_is_a_reason(monkeypatch):
    def require():
        raise RuntimeError("no C++ compiler: c++ cannot be found")

    monkeypatch.setattr(installation, "_require_compiler", require)
    assert state_of(fake()) == Extension("k", "absent", "no C++ compiler: c++ cannot be found")


def test_nvcc_is_asked_where_cuda_home_says(monkeypatch, tmp_path):
    asked = []

    def run(argv, **_):
        asked.append(argv[0])
        return SimpleNamespace(stdout="Cuda compilation tools, release 12.8, V12.8.61")

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert system_cuda(run) == "12.8" and asked == [str(tmp_path / "bin" / "nvcc")]
    assert system_cuda() is None  # nothing there
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "")
    assert system_cuda(run) is None
