from .base_grad_scaler import BaseGradScaler


class ConstantGradScaler(BaseGradScaler):
    """A loss scale that never changes; steps that overflow are counted."""

    def __init__(self, initial_scale: float, verbose: bool) -> None:
        super().__init__(initial_scale, verbose)
        self.log(f"constant loss scale {self.value:g}")

    def update(self, overflow: bool) -> None:
        self._count(overflow)
