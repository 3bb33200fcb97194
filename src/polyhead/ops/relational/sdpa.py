"""Relational attention through PyTorch's fused kernels, for relations without an activation: an exact reduction.

    sum_j a_hij (q_rel_ir . k_rel_jr)  =  q_rel_ir . sum_j a_hij k_rel_jr

so the kernel takes relation keys as further values, and each sum is then multiplied by the relation query.  Altabaa and
Lafferty 2024 (arXiv 2405.16727), with the identity.
"""

from dataclasses import replace

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.latent_code import share
from polyhead.ops.tiles import fused

WIDTH = 256
"""The largest width of values in one call: the limit of flash kernels."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if x.act != "identity":
        return f"takes relation_act='identity' only, not {x.act!r}"
    return "takes symbols by key only" if x.symbols.ndim == 3 else backward_once(x)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference and tiles?  Only with narrow relations and no bias.

    Forward and backward at t = 1024 (b = 4, h = 8, d = 32, float32, one core), CPU seconds of tiles over those of the
    kernel, causal and full.  8 relations of width 1: 1.4 and 1.9; 64: 1.9 and 2.6; 16 of width 2: 1.1 causal; 2 of
    width 8: 1.0 and 1.4; 8 of width 4: 0.9 and 1.3; 8 of width 32: 0.2 and 0.3.
    """
    (r, p), d = x.related[0].shape[2:], x.q.shape[-1]
    return x.bias is None and (p == 1 or (r * p <= d and (p == 2 or not x.causal)))


def forward(x: AttentionCall) -> Tensor:
    """Relational attention by a few calls of `scaled_dot_product_attention`, with relation keys among the values."""
    (q_rel, k_rel), h, e = x.related, x.q.shape[2], x.symbols.shape[-1]
    p = q_rel.shape[3]
    keys = k_rel.flatten(2).unsqueeze(2).expand(-1, -1, h, -1)
    values = torch.cat((share(x.symbols, h), keys), -1).split(WIDTH, dim=-1)
    read = torch.cat([fused(replace(x, v=v)) for v in values], -1)
    related = einsum(read[..., e:].unflatten(3, (-1, p)), q_rel * p**-0.5, "b t h r p, b t r p -> b t h r")
    return read[..., :e] + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")
