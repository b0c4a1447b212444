"""One call that seeds every generator."""

import random

import numpy as np
import torch


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on all devices with ``seed``.

    Args:
        cuda_deterministic: make cuDNN choose deterministic algorithms, which are slower; otherwise it may search for
        fast ones.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds the accelerators too
    torch.backends.cudnn.deterministic = cuda_deterministic
    torch.backends.cudnn.benchmark = not cuda_deterministic
