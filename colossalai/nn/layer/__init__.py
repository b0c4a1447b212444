from .layernorm import MixedFusedLayerNorm
from .scaled_softmax import AttnMaskType, FusedScaleMaskSoftmax, ScaledMaskedSoftmax, ScaledUpperTriangMaskedSoftmax
from .utils import divide

__all__ = [
    "AttnMaskType",
    "FusedScaleMaskSoftmax",
    "MixedFusedLayerNorm",
    "ScaledMaskedSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "divide",
]
