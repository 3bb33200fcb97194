"""Transformer blocks.

pre-norm:   x = x + attention(norm1(x));   x = x + feedforward(norm2(x))     (a final norm follows the last block)
post-norm:  x = norm1(x + attention(x));   x = norm2(x + feedforward(x))     (Vaswani et al. 2017; no final norm)
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead.layers import Device
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.taps import Taps
from polyhead.shapes import one_of


def build_norm(
    kind: str,
    dim: int,
    eps: float,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> RMSNorm | LayerNorm:
    """`kind` is "layer" or "rms"."""
    cls = LayerNorm if one_of("norm", "kind", kind, ("layer", "rms")) == "layer" else RMSNorm
    return cls(dim, eps=eps, device=device, dtype=dtype)


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each around a residual.

    >>> block = TransformerBlock(MultiHeadAttention(64, [Hyla(8)]), SwiGLU(64), norm="rms")
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        norm_order: str = "pre",
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pre = one_of("TransformerBlock", "norm_order", norm_order, ("pre", "post")) == "pre"
        self.norm1 = build_norm(norm, attention.dim, norm_eps, device=device, dtype=dtype)
        self.attention = attention
        self.norm2 = build_norm(norm, attention.dim, norm_eps, device=device, dtype=dtype)
        self.feedforward = feedforward
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        tail: int | None = None,
        keep: Float[Tensor, "..."] | None = None,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ m"]:
        """The block at all positions, or at the last `tail` of them, with nothing computed for the others but keys.

        `keep` (b|1 h|1 t s) replaces the layer's dropout; of it, too, the last `tail` rows are read.
        """
        source = self.norm1(x) if self.pre else x
        if tail is None or tail == x.shape[1]:
            y = self.attention(source, mask=mask, positions=positions, keep=keep, taps=taps)
        else:
            if positions is not None:
                raise ValueError("TransformerBlock: tail counts positions from 0, so positions cannot be given")
            where = torch.arange(x.shape[1] - tail, x.shape[1], device=x.device)[None]
            rows = mask if mask is None or mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., -tail:, :]
            keep = keep if keep is None else keep[..., -tail:, :]
            x = x[:, -tail:]
            y = self.attention(source[:, -tail:], source, mask=rows, positions=where, keep=keep, taps=taps)
        x = x + self.dropout(y) if self.pre else self.norm1(x + self.dropout(y))
        z = self.feedforward(self.norm2(x) if self.pre else x)
        return x + self.dropout(z) if self.pre else self.norm2(x + self.dropout(z))
