from .init import (
    kaiming_normal_,
    kaiming_uniform_,
    lecun_normal_,
    lecun_uniform_,
    normal_,
    ones_,
    trunc_normal_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
    zeros_,
)

__all__ = [
    "kaiming_normal_",
    "kaiming_uniform_",
    "lecun_normal_",
    "lecun_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]
