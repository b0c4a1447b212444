import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MixedFusedLayerNorm(nn.Module):
    """Layer norm over the last dims whose input and weights may differ in dtype.

    ``(..., *normalized_shape)`` to the same shape. Statistics and arithmetic are in the wider of the two dtypes; the
    output has the weights' dtype.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size([normalized_shape] if isinstance(normalized_shape, int) else normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        out = self.weight.dtype
        if input.dtype == out:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        wide = torch.promote_types(input.dtype, out)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(input.to(wide), self.normalized_shape, weight, bias, self.eps).to(out)

    def extra_repr(self) -> str:
        return f"normalized_shape={tuple(self.normalized_shape)}, eps={self.eps}"
