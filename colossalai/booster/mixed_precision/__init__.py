from colossalai.utils.errors import ConfigError
from colossalai.utils.pending import pending_names

from .autocast import BF16MixedPrecision, FP16TorchMixedPrecision, TorchAMPModule, TorchAMPOptimizer
from .mixed_precision_base import MixedPrecision

__getattr__ = pending_names(__name__)

__all__ = [
    "BF16MixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "TorchAMPModule",
    "TorchAMPOptimizer",
    "mixed_precision_factory",
]

_BY_NAME = {"fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}
_PENDING = {"fp16_apex": "FP16ApexMixedPrecision", "fp16_naive": "FP16NaiveMixedPrecision", "fp8": "FP8MixedPrecision"}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """The way of mixed precision of that name: "fp16" or "bf16"."""
    if mixed_precision_type in _PENDING:
        return __getattr__(_PENDING[mixed_precision_type])()
    if mixed_precision_type not in _BY_NAME:
        raise ConfigError(f"mixed_precision={mixed_precision_type!r}: use one of {list(_BY_NAME)}")
    return _BY_NAME[mixed_precision_type]()
