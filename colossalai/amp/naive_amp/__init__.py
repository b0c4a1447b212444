from .mixed_precision_mixin import BF16MixedPrecisionMixin, FP16MixedPrecisionMixin, MixedPrecisionMixin
from .mixed_precision_optimizer import MixedPrecisionOptimizer

__all__ = ["BF16MixedPrecisionMixin", "FP16MixedPrecisionMixin", "MixedPrecisionMixin", "MixedPrecisionOptimizer"]
