"""Initialisers with explicit fans.

Each function makes an ``initializer(tensor, fan_in=None, fan_out=None)`` that fills the tensor in place and returns it.
Where a weight is cut over ranks its shape no longer tells how many inputs a neuron has: the owner of the whole weight
gives the fans. Without them they are read from the tensor, as torch does.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import init

from colossalai.utils.errors import ConfigError

Initializer = Callable[..., Tensor]

# Standard deviation of a standard normal distribution cut at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978


def zeros_() -> Initializer:
    """All 0."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.zeros_(tensor)

    return initializer


def ones_() -> Initializer:
    """All 1."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.ones_(tensor)

    return initializer


def uniform_(a: float = 0.0, b: float = 1.0) -> Initializer:
    """Uniform in ``[a, b)``."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.uniform_(tensor, a, b)

    return initializer


def normal_(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normal with this mean and standard deviation."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.normal_(tensor, mean, std)

    return initializer


def trunc_normal_(mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Initializer:
    """Normal, cut to ``[a, b]``."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.trunc_normal_(tensor, mean, std, a, b)

    return initializer


def kaiming_uniform_(a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Uniform within ``sqrt(3) * gain / sqrt(fan)`` (He et al. 2015); ``mode`` says which fan."""
    gain = _kaiming_gain(a, mode, nonlinearity)

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        fan = _fan(tensor, mode, fan_in, fan_out)
        bound = math.sqrt(3.0) * gain / math.sqrt(fan) if fan else 0.0
        return init.uniform_(tensor, -bound, bound)

    return initializer


def kaiming_normal_(a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Normal with standard deviation ``gain / sqrt(fan)`` (He et al. 2015); ``mode`` says which fan."""
    gain = _kaiming_gain(a, mode, nonlinearity)

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        fan = _fan(tensor, mode, fan_in, fan_out)
        return init.normal_(tensor, 0, gain / math.sqrt(fan) if fan else 0.0)

    return initializer


def xavier_uniform_(a: float = math.sqrt(3.0), scale: float = 2.0, gain: float = 1.0) -> Initializer:
    """Uniform within ``a * gain * sqrt(scale / (fan_in + fan_out))`` (Glorot & Bengio 2010).

    With ``fan_in`` given and ``fan_out`` not, ``fan_in`` alone counts.
    """

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        bound = a * gain * _xavier_root(tensor, scale, fan_in, fan_out)
        return init.uniform_(tensor, -bound, bound)

    return initializer


def xavier_normal_(scale: float = 2.0, gain: float = 1.0) -> Initializer:
    """Normal with standard deviation ``gain * sqrt(scale / (fan_in + fan_out))`` (Glorot & Bengio 2010).

    With ``fan_in`` given and ``fan_out`` not, ``fan_in`` alone counts.
    """

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        return init.normal_(tensor, 0.0, gain * _xavier_root(tensor, scale, fan_in, fan_out))

    return initializer


def lecun_uniform_() -> Initializer:
    """Uniform within ``sqrt(3 / fan_in)`` (LeCun et al. 1998)."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        fan = _fan(tensor, "fan_in", fan_in, fan_out)
        bound = math.sqrt(3.0 / fan) if fan else 0.0
        return init.uniform_(tensor, -bound, bound)

    return initializer


def lecun_normal_() -> Initializer:
    """Normal with standard deviation ``sqrt(1 / fan_in)``, drawn from one cut at two deviations (LeCun et al. 1998)."""

    def initializer(tensor: Tensor, fan_in: int | None = None, fan_out: int | None = None) -> Tensor:
        fan = _fan(tensor, "fan_in", fan_in, fan_out)
        std = math.sqrt(1.0 / fan) / _TRUNCATED_STD if fan else 0.0
        if std == 0.0:
            return init.zeros_(tensor)
        return init.trunc_normal_(tensor, std=std, a=-2.0 * std, b=2.0 * std)

    return initializer


def _kaiming_gain(a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ConfigError(f'mode={mode!r} must be "fan_in" or "fan_out"')
    return init.calculate_gain(nonlinearity, a)


def _fan(tensor: Tensor, mode: str, fan_in: int | None, fan_out: int | None) -> int:
    """The fan ``mode`` asks for: as given, else of the tensor's own shape."""
    given = fan_in if mode == "fan_in" else fan_out
    return _own_fans(tensor, mode)[mode == "fan_out"] if given is None else given


def _xavier_root(tensor: Tensor, scale: float, fan_in: int | None, fan_out: int | None) -> float:
    if fan_in is None:
        own_in, own_out = _own_fans(tensor, "fan_in")
        fan_in, fan_out = own_in, own_out if fan_out is None else fan_out
    fan = fan_in + (fan_out or 0)
    return math.sqrt(scale / fan) if fan else 0.0


def _own_fans(tensor: Tensor, name: str) -> tuple[int, int]:
    if tensor.dim() < 2:
        raise ConfigError(f"{name} must be given for a tensor of shape {tuple(tensor.shape)}: it has no inputs and outputs")
    receptive = torch.Size(tensor.shape[2:]).numel()
    return tensor.shape[1] * receptive, tensor.shape[0] * receptive
