"""Train large models on many devices, with the numbers of one.

Importing this package loads torch and little else; every subpackage is imported where it is used.
"""

import os
import sys

# Tensor-parallel overlap relies on kernels reaching the device in issue order; CUDA reads this once, when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from .utils.pending import install, pending_names  # noqa: E402
from .utils.version_file import version_module  # noqa: E402

install()
sys.modules[f"{__name__}.version"] = version = version_module()
__version__: str = version.__version__

from . import accelerator  # noqa: E402
from .initialize import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch  # noqa: E402

__getattr__ = pending_names(__name__)

__all__ = ["__version__", "accelerator", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]
