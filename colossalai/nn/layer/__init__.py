from colossalai.utils.pending import pending_names

from .layernorm import MixedFusedLayerNorm
from .scaled_softmax import AttnMaskType, FusedScaleMaskSoftmax, ScaledMaskedSoftmax, ScaledUpperTriangMaskedSoftmax
from .utils import divide

__getattr__ = pending_names(__name__)

__all__ = [
    "AttnMaskType",
    "FusedScaleMaskSoftmax",
    "MixedFusedLayerNorm",
    "ScaledMaskedSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "divide",
]
