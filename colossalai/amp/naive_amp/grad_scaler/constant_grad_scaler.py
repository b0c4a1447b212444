from .base_grad_scaler import BaseGradScaler


class ConstantGradScaler(BaseGradScaler):
    def update(self, overflow: bool) -> None: ...
