"""The builders: what keys the cache, what is refused, and what a build gives."""

import shutil
import sys
from pathlib import Path

import pytest
from colossalai.kernel.extensions import cache, cpp_extension, toolchain

import colossalai.kernel  # noqa: F401 - brings colossalai.kernel.extensions
from colossalai.kernel import extensions

pytestmark = pytest.mark.fast

SKYLAKE = "processor\t: 0\nflags\t\t: fpu sse2 avx2 fma avx512f\n\nprocessor\t: 1\nflags\t\t: fpu sse2 avx2 fma avx512f\n"
HASWELL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 fma\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve\n"


def test_c4_cache_key_differs_for_two_cpus():
    keys = {cache.cache_key("2.13.0", "cpu", cache.cpu_features(text), b"") for text in (SKYLAKE, HASWELL, GRAVITON)}
    assert len(keys) == 3
    assert cache.cpu_features(SKYLAKE) == ("avx2", "avx512f", "fma", "fpu", "sse2")
    assert cache.cpu_features(GRAVITON) == ("asimd", "fp", "sve")


def test_c4_cache_key_differs_for_torch_device_and_sources():
    same = ("2.13.0+cpu", "cpu", ("avx2", "fma"), b"text")
    others = [
        ("2.13.1+cpu", "cpu", ("avx2", "fma"), b"text"),
        ("2.13.0+cpu", "cuda-13.0", ("avx2", "fma"), b"text"),
        ("2.13.0+cpu", "cpu", ("avx2fma",), b"text"),
        ("2.13.0+cpu", "cpu", ("avx2", "fma"), b"texts"),
    ]
    keys = {cache.cache_key(*key) for key in (same, *others)}
    assert len(keys) == 5 and cache.cache_key(*same) in keys
    assert all(key.startswith("torch2.13_c") for key in keys)


def test_c4_the_cache_of_this_machine_follows_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    here = extensions.CpuAdamX86Extension.get_jit_extension_folder_path()
    assert Path(here).parent == tmp_path and here == str(cache.cache_folder())
    monkeypatch.setattr(cache, "cpu_features", lambda: ("another", "cpu"))
    assert extensions.CpuAdamX86Extension.get_jit_extension_folder_path() != here
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert cache.cache_folder().parent == Path.home() / ".cache" / "colossalai" / "torch_extensions"


def test_features_of_a_system_without_cpuinfo():
    assert len(cache.cpu_features("")) == 2


@pytest.mark.parametrize(
    ("value", "on"),
    [
        (None, False),
        ("", False),
        ("0", False),
        ("No", False),
        ("1", True),
        (" TRUE ", True),
        ("yes", True),
        ("on", True),
    ],
)
def test_build_flag(value, on):
    assert toolchain.build_flag({} if value is None else {"BUILD_EXT": value}) is on


def test_build_flag_is_strict():
    with pytest.raises(ValueError, match="BUILD_EXT='y' is neither on"):
        toolchain.build_flag({"BUILD_EXT": "y"})


def test_c4_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(toolchain.NativeBuildError, match=r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ cannot be found"):
        extensions.native_modules()
    monkeypatch.setenv("CXX", "ccache no-such-c++")
    with pytest.raises(toolchain.NativeBuildError, match=r"no-such-c\+\+ named by CXX cannot be found"):
        toolchain.require_compiler()


def test_c4_jit_without_a_compiler_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(toolchain.NativeBuildError, match="no C"):
        extensions.CpuAdamX86Extension().build_jit()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []  # no half-made file, no lock


def test_a_source_that_does_not_compile_shows_the_compilers_words(monkeypatch, tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    (tmp_path / "bad.cpp").write_text("int main( {")

    class Bad(extensions.CpuAdamX86Extension):
        def sources_files(self):
            return [tmp_path / "bad.cpp"]

    with pytest.raises(toolchain.NativeBuildError, match="does not compile:(.|\n)*bad.cpp:1"):
        Bad().build_jit()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_c6_windows_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    for call in (extensions.native_modules, extensions.CpuAdamX86Extension().assert_compatible):
        with pytest.raises(toolchain.NativeBuildError, match="Windows.*unset BUILD_EXT"):
            call()


def test_no_flag_ties_a_build_to_this_cpu():
    for kind in extensions.ALL_EXTENSIONS:
        assert not [flag for flag in kind().cxx_flags() if "march" in flag or "mtune" in flag or "mcpu" in flag]
        assert all(path.is_file() for path in kind().sources_files())


def test_names_of_the_public_api():
    x86, arm = extensions.CpuAdamX86Extension(), extensions.CpuAdamArmExtension()
    assert (x86.name, arm.name) == ("cpu_adam_x86", "cpu_adam_arm")
    assert x86.support_aot and x86.support_jit and x86.priority == 1
    assert not (x86.is_available() and arm.is_available())


def test_a_machine_that_fits_nothing(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(toolchain.NativeBuildError, match="cpu_adam_arm is for aarch64 or arm64, not for riscv64"):
        extensions.CpuAdamArmExtension().assert_compatible()
    if shutil.which("c++") is not None:
        with pytest.raises(toolchain.NativeBuildError, match="none of cpu_adam_x86, cpu_adam_arm fits"):
            extensions.native_modules()


def test_cuda_builder_says_what_is_missing():
    import torch

    class Kernel(extensions._CudaExtension):
        def sources_files(self):
            return []

    kernel = Kernel("nothing_cuda")
    assert not [flag for flag in kernel.nvcc_flags() if "arch" in flag]
    if torch.version.cuda is None:
        assert kernel.is_available() is False
        with pytest.raises(toolchain.NativeBuildError, match="nothing_cuda needs a torch built for CUDA"):
            kernel.build_jit()


def test_waiting_for_a_build_of_another_process_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_extension, "_WAIT_SECONDS", 0.3)
    library = tmp_path / "kernel.so"
    library.with_suffix(".lock").touch()  # left by a process that was killed
    with cpp_extension._one_at_a_time(library):
        pass
    library.with_suffix(".lock").unlink()
    with cpp_extension._one_at_a_time(library):
        assert library.with_suffix(".lock").exists()
    assert not library.with_suffix(".lock").exists()
