"""Finding the best kernel there is: built ahead of time, just in time, or none, where torch does the work.

The builders and the native sources are ``colossalai.kernel.extensions``. In a checkout they lie in the folder
``extensions/`` beside the package, from where they are taken under the same name.
"""

import importlib.util
import sys
from pathlib import Path

from ..utils.pending import pending_names


def _attach_extensions() -> None:
    name = f"{__name__}.extensions"
    if importlib.util.find_spec(name) is not None:
        return
    folder = Path(__file__).resolve().parents[2] / "extensions"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    globals()["extensions"] = module


_attach_extensions()

from .kernel_loader import CPUAdamLoader, KernelLoader  # noqa: E402

__getattr__ = pending_names(__name__)

__all__ = ["CPUAdamLoader", "KernelLoader"]
