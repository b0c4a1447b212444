"""Builds the package: pure Python unless BUILD_EXT asks for the native extensions (see extensions/)."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
SOURCES = "colossalai.kernel.extensions"  # where the builders and the native sources are installed


def load_builders():
    """The package extensions/ of this folder. Build front ends do not put the folder on sys.path."""
    spec = importlib.util.spec_from_file_location(
        "colossalai_extensions",
        HERE / "extensions" / "__init__.py",
        submodule_search_locations=[str(HERE / "extensions")],
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_version() -> str:
    """Copy the version from version.txt to colossalai/version.py, which an installed package reads."""
    version = (HERE / "version.txt").read_text(encoding="utf-8").strip()
    target = HERE / "colossalai" / "version.py"
    text = f'"""Written by setup.py from version.txt."""\n\n__version__ = "{version}"\n'
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")
    return version


def requirements(name: str) -> list[str]:
    """The lines of a file in requirements/, without comments."""
    lines = (HERE / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def native_build() -> tuple[list, dict]:
    """The extension modules to build and the command that builds them; nothing unless BUILD_EXT is on."""
    builders = load_builders()
    try:
        if not builders.build_flag():
            return [], {}
    except ValueError as error:
        raise SystemExit(f"setup.py: {error}") from None
    try:
        return builders.native_modules()
    except builders.NativeBuildError as error:
        # Metadata can be had without a compiler; only the build itself is refused.
        return [Extension("colossalai._C.refused", sources=[])], {"build_ext": refusing(str(error))}


def refusing(reason: str) -> type[build_ext]:
    """A build command that ends at once with the reason."""

    class Refused(build_ext):
        def run(self) -> None:
            raise SystemExit(f"setup.py: {reason}")

    return Refused


VERSION = write_version()
HF, PLOT = ["transformers>=5.9", "peft"], ["matplotlib"]
TEST, DOCS = requirements("requirements-test.txt"), requirements("requirements-docs.txt")
EXTENSIONS, COMMANDS = native_build()

setup(
    name="colossalai",
    version=VERSION,
    description="Train large models on many devices, with the numbers of one",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=requirements("requirements.txt"),
    extras_require={"hf": HF, "plot": PLOT, "test": TEST, "docs": DOCS, "dev": [*TEST, *DOCS, "ruff", "build"]},
    packages=[
        *find_packages(include=["colossalai", "colossalai.*"]),
        SOURCES,
        *(f"{SOURCES}.{name}" for name in find_packages("extensions")),
    ],
    package_dir={SOURCES: "extensions"},
    package_data={SOURCES: ["csrc/**/*.cpp", "csrc/**/*.h", "csrc/**/*.cu"]},
    include_package_data=False,
    entry_points={"console_scripts": ["colossalai=colossalai.cli:cli"]},
    ext_modules=EXTENSIONS,
    cmdclass=COMMANDS,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
