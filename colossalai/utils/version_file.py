"""The version, from the one file that states it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parents[1]


def version_module() -> ModuleType:
    """The module ``colossalai.version``, right in a checkout too.

    A checkout has ``version.txt`` beside the package, and that file wins: ``version.py``, written there by the last
    build, may be older. An installed package has only ``version.py``.
    """
    name = "colossalai.version"
    stated, built = _PACKAGE.parent / "version.txt", _PACKAGE / "version.py"
    if stated.is_file() and (_PACKAGE.parent / "setup.py").is_file():
        module = ModuleType(name, "The version of this checkout, read from version.txt.")
        module.__version__ = stated.read_text(encoding="utf-8").strip()
        return module
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, built)
    if spec is None or spec.loader is None or not built.is_file():
        raise ImportError(
            f"neither {stated} nor {built} exists: this copy of colossalai is not complete. "
            "Install it with `pip install .` from the source folder."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
