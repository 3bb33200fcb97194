"""The blocks of a transformer, from its configuration."""

import functools
from typing import Unpack

from polyhead import config
from polyhead.config import TransformerConfig
from polyhead.layers.attention import MultiHeadAttention, Positions, rotary_tables
from polyhead.layers.block import TransformerBlock
from polyhead.layers.device import Device, Placement
from polyhead.layers.feedforward import build_feedforward


def layer_positions(settings: TransformerConfig, device: Device) -> Positions:
    """The argument `positions` of every layer: layers share rotary tables, but each has its own relative bias."""
    positions = settings.positions
    if isinstance(positions, config.Rotary):
        layers = [settings.layer_heads(i) for i in range(settings.layers)]
        return rotary_tables(positions, layers, settings.dim, settings.max_length, device)
    if isinstance(positions, (config.RelativeBias, config.Alibi)):
        return positions
    return None  # positions that are added to the inputs


def build_block(
    settings: TransformerConfig, layer: int, positions: Positions, **placement: Unpack[Placement]
) -> TransformerBlock:
    """The block of a layer; `positions` are those of `layer_positions`."""
    # What self- and cross-attention have in common.  The model owns the sources of symbols, so attention builds none.
    attention = functools.partial(
        MultiHeadAttention,
        settings.dim,
        bias=settings.bias,
        qk_norm=settings.qk_norm,
        dropout=settings.dropout,
        dropout_shared=settings.dropout_shared,
        max_length=settings.max_length,
        own_symbols=False,
        **placement,
    )
    self_attention = attention(
        settings.layer_heads(layer), causal=settings.causal, positions=positions, window=settings.window
    )
    # Cross-attention has no positions, because each sequence counts its own.
    cross_heads = settings.layer_cross_heads(layer)
    cross = None
    if cross_heads:
        cross = attention(cross_heads)
    return TransformerBlock(
        self_attention,
        build_feedforward(settings.feedforward, settings.dim, **placement),
        cross=cross,
        norm=settings.norm,
        norm_eps=settings.norm_eps,
        norm_order=settings.norm_order,
        dropout=settings.residual_dropout,
        layer=layer,
        **placement,
    )
