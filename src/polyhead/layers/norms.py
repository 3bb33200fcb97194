"""Normalisation layers: the functions of `ops.norms` with their parameters."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.layers.device import Device
from polyhead.ops.norms import layer_norm, rms_norm
from polyhead.spec.shapes import check_number

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; computed in at least float32 (Zhang and Sennrich
    2019)."""

    def __init__(self, dim: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_number("RMSNorm", "eps", eps, 0)
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Gain 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class LayerNorm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension; computed in at least float32 (Ba et
    al. 2016)."""

    bias: nn.Parameter | None

    def __init__(
        self, dim: int, eps: float = 1e-5, bias: bool = True, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_number("LayerNorm", "eps", eps, 0)
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Gain 1, shift 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, bias={self.bias is not None}"
