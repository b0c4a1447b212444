from .base_grad_scaler import BaseGradScaler


class DynamicGradScaler(BaseGradScaler):
    def __init__(self, initial_scale=2**16, growth_factor=2, backoff_factor=0.5, growth_interval=1000, min_scale=None, max_scale=None, hysteresis=2, verbose=False):
        super().__init__(initial_scale, verbose)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.max_scale, self.hysteresis = min_scale, max_scale, hysteresis
        self._g = self._h = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self._h += 1; self._g = 0
            if self._h >= self.hysteresis: self._value = max(self._value * self.backoff_factor, self.min_scale or 0)
        else:
            self._g += 1
            if self._g == self.growth_interval:
                self._g = self._h = 0; self._value = min(self._value * self.growth_factor, self.max_scale or 1e38)
