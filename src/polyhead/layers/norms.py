"""Normalisation layers: those of PyTorch with the functions of `ops.norms`, computed in at least float32."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.layers.device import Device
from polyhead.ops.norms import layer_norm, rms_norm
from polyhead.spec.shapes import check_number

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019)."""

    eps: float

    def __init__(self, dim: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None) -> None:
        check_number("RMSNorm", "eps", eps, 0)
        super().__init__(dim, eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016)."""

    def __init__(
        self, dim: int, eps: float = 1e-5, bias: bool = True, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        check_number("LayerNorm", "eps", eps, 0)
        super().__init__(dim, eps, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return layer_norm(x, self.weight, self.bias, self.eps)
