from colossalai.utils.pending import pending_names

from .cpu_adam import CPUAdam
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD
from .hybrid_adam import HybridAdam
from .lamb import Lamb
from .lars import Lars

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars"]

__getattr__ = pending_names(__name__)
