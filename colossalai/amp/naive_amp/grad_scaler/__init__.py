from .base_grad_scaler import BaseGradScaler
from .constant_grad_scaler import ConstantGradScaler
from .dynamic_grad_scaler import DynamicGradScaler

__all__ = ["BaseGradScaler", "ConstantGradScaler", "DynamicGradScaler"]
