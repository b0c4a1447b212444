from colossalai.utils.pending import pending_names

from .low_level import LowLevelZeroOptimizer

__getattr__ = pending_names(__name__)

__all__ = ["LowLevelZeroOptimizer"]
