from .model import AMPModelMixin, ModelWrapper, PeftUnwrapMixin
from .optimizer import DistributedOptim, OptimizerWrapper
from .pretrained import get_pretrained_path, set_pretrained_path
from .token_weight import TokenWeight

__all__ = [
    "AMPModelMixin",
    "DistributedOptim",
    "ModelWrapper",
    "OptimizerWrapper",
    "PeftUnwrapMixin",
    "TokenWeight",
    "get_pretrained_path",
    "set_pretrained_path",
]
