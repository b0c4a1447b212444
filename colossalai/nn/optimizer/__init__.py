from colossalai.utils.pending import pending_names

from .cpu_adam import CPUAdam
from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .hybrid_adam import HybridAdam

__getattr__ = pending_names(__name__)
