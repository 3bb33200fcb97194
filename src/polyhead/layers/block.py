"""Transformer blocks.

pre-norm:   x = x + attention(norm1(x));   x = x + feedforward(norm2(x))     (a final norm follows the last block)
post-norm:  x = norm1(x + attention(x));   x = norm2(x + feedforward(x))     (Vaswani et al. 2017; no final norm)

A decoder's block attends to another sequence in between, through `norm_cross` and `cross`, in the same two forms.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.cache import LayerCache, whole
from polyhead.layers.call import check_pairs
from polyhead.layers.device import Device, Placement
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.taps import Taps
from polyhead.ops.call import Packed
from polyhead.ops.latent_code import of_pairs
from polyhead.spec import NORM_ORDERS, NORMS
from polyhead.spec.shapes import check_rate, one_of

# The type of the argument `symbols` of `MultiHeadAttention.forward`.
Symbols = Tensor | Sequence[Tensor | None] | None


def build_norm(kind: str, dim: int, eps: float, **placement: Unpack[Placement]) -> RMSNorm | LayerNorm:
    """`kind` is "layer" or "rms"."""
    if one_of("norm", "kind", kind, NORMS) == "layer":
        return LayerNorm(dim, eps=eps, **placement)
    return RMSNorm(dim, eps=eps, **placement)


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each with a residual; with `cross`, attention to a context between them.

    >>> block = TransformerBlock(MultiHeadAttention(64, [Hyla(8)]), SwigluLayer(64), norm="rms")
    >>> decoder = TransformerBlock(
    ...     MultiHeadAttention(64, Softmax(8), causal=True), MlpLayer(64), cross=MultiHeadAttention(64, Softmax(8))
    ... )
    >>> decoder(torch.randn(2, 5, 64), torch.randn(2, 9, 64)).shape
    torch.Size([2, 5, 64])

    Args:
        layer: The layer of a model for which the block was built; the model computes the block's symbols accordingly.
    """

    cross: MultiHeadAttention | None

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        cross: MultiHeadAttention | None = None,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        norm_order: str = "pre",
        dropout: float = 0.0,
        layer: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        if not hasattr(attention, "dim"):
            raise ValueError(f"TransformerBlock: attention must be a MultiHeadAttention but is {attention!r:.60}")
        self.pre = one_of("TransformerBlock", "norm_order", norm_order, NORM_ORDERS) == "pre"
        self.norm1 = build_norm(norm, attention.dim, norm_eps, device=device, dtype=dtype)
        self.attention = attention
        self.cross = cross
        if cross is not None and cross.reads_all_queries and (attention.causal or attention.window is not None):
            raise ValueError("TransformerBlock: cross-attention with network='sequence' would read later queries")
        if cross is not None:
            self.norm_cross = build_norm(norm, attention.dim, norm_eps, device=device, dtype=dtype)
        self.norm2 = build_norm(norm, attention.dim, norm_eps, device=device, dtype=dtype)
        self.feedforward = feedforward
        self.reads_all_queries = attention.reads_all_queries or (cross is not None and cross.reads_all_queries)
        check_rate("TransformerBlock", dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        context: Float[Tensor, "b s m"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        context_mask: Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        tail: int | None = None,
        keep: Float[Tensor, "..."] | None = None,
        symbols: Symbols = None,
        context_symbols: Symbols = None,
        cu_seqlens: Packed | None = None,
        cache: LayerCache | None = None,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ m"]:
        """The block's output at all positions, or only at the last `tail`.

        Args:
            context_mask: Like `mask`, over the context: `cross` attends to `context` where `context_mask` is True.
            tail: At the other positions only keys and values are computed, unless a mechanism reads all queries.
            keep: Replaces the dropout of the self-attention (b|1 h|1 t s); with `tail`, only its last rows are read.
            symbols: The symbols of x.
            context_symbols: The symbols of the context.
            cu_seqlens: Edges of packed sequences in x, see `MultiHeadAttention`; they exclude a context and a tail.
        """
        self._check(x, context, context_mask, context_symbols, cu_seqlens, tail)
        num_outputs = x.shape[1] if tail is None else tail
        with whole(cache):
            source = self._before(x, self.norm1)
            # What reads all queries computes all outputs; the tail is cut off the result.
            if num_outputs == x.shape[1] or self.reads_all_queries:
                options = {"positions": positions, "cu_seqlens": cu_seqlens, "cache": cache}
                y = self.attention(source, mask=mask, keep=keep, symbols=symbols, taps=taps, **options)
            else:
                if positions is not None or cache is not None:
                    name = "positions" if cache is None else "a cache"
                    raise ValueError(f"TransformerBlock: tail counts positions from 0, so {name} cannot be given")
                y = self._attend_tail(x, num_outputs, source, mask, keep, symbols=symbols, taps=taps)
                x = x[:, -num_outputs:]
            x = self._add(x, y, self.norm1)
            if self.cross is not None:
                receivers = self._before(x, self.norm_cross)
                y = self.cross(receivers, context, mask=context_mask, symbols=context_symbols, cache=cache, taps=taps)
                x = self._add(x, y, self.norm_cross)
            if self.reads_all_queries:
                x = x[:, x.shape[1] - num_outputs :]
            return self._add(x, self.feedforward(self._before(x, self.norm2)), self.norm2)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x, normalised in a pre-norm block."""
        if self.pre:
            return norm(x)
        return x

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """x + dropout(y), normalised in a post-norm block."""
        x = x + self.dropout(y)
        if self.pre:
            return x
        return norm(x)

    def _attend_tail(
        self,
        x: Tensor,
        tail: int,
        source: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        *,
        symbols: Symbols,
        taps: list[Taps] | None,
    ) -> Tensor:
        """Self-attention of the last `tail` tokens of x to all of `source`, x after its norm, as cross-attention."""
        # The whole mask and `keep` are checked before they are cut: rows of a wrong shape would be taken for others.
        b, t = source.shape[:2]
        is_of_tail = keep is not None and keep.shape[-2:-1] == (tail,)
        check_pairs((b, self.attention.total_heads, t, t), mask, None, None if is_of_tail else keep)
        if mask is not None:
            mask = of_pairs(mask)
        num_rows = tail
        # A mask of keys (b 1 1 s) serves every query; one of pairs is cut to the rows of the tail.
        if mask is not None and mask.shape[-2] > 1:
            # A single row would be taken for a mask of keys, so at least two are computed.
            num_rows = max(tail, 2)
            mask = mask[..., -num_rows:, :]
        if keep is not None:
            if is_of_tail:
                keep = keep.expand(*keep.shape[:-2], num_rows, -1)
            keep = keep[..., -num_rows:, :]
        first = source.shape[1] - num_rows
        positions = torch.arange(first, source.shape[1], device=source.device)[None]
        # Normed once more: a part of `source` would cost the backward pass a tensor of its whole size.
        receivers = self._before(x[:, -num_rows:], self.norm1)
        y = self.attention(
            receivers, source, mask=mask, keep=keep, symbols=symbols, positions=positions, first=first, taps=taps
        )
        return y[:, -tail:]

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        context_mask: Tensor | None,
        context_symbols: Symbols,
        cu_seqlens: Tensor | None,
        tail: int | None,
    ) -> None:
        if context is not None and self.cross is None:
            raise ValueError("TransformerBlock: context must be None, as this block has no cross-attention")
        if context is None and self.cross is not None:
            raise ValueError("TransformerBlock: context must be given, as this block has cross-attention")
        for name, of_context in {"context_mask": context_mask, "context_symbols": context_symbols}.items():
            if context is None and of_context is not None:
                raise ValueError(f"TransformerBlock: {name} must come with a context")
        if cu_seqlens is not None and (context is not None or tail is not None):
            name = "context" if tail is None else "tail"
            raise ValueError(f"TransformerBlock: with cu_seqlens x is several sequences, so {name} must be None")
        if tail is not None and not 1 <= tail <= x.shape[1]:
            raise ValueError(f"TransformerBlock: tail must be 1 to {x.shape[1]} (the positions) but is {tail}")
