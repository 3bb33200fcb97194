"""Relational attention through PyTorch's fused kernels, for relations without an activation: an exact reduction.

    sum_j a_hij (q_rel_ir . k_rel_jr)  =  q_rel_ir . sum_j a_hij k_rel_jr

so the relation keys are values, too, and only what a query reads of them meets its relation query.  Altabaa and
Lafferty 2024 (arXiv 2405.16727), with the identity.
"""

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.latent_code import Inputs, share
from polyhead.ops.tiles import fused, refuse

WIDTH = 256
"""Values of one call of the kernel, at most: what flash kernels take."""


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if inputs.act != "identity":
        return f"takes relation_act='identity' only, not {inputs.act!r}"
    return "takes symbols by key only" if inputs.symbols.ndim == 3 else backward_once(inputs)


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference and tiles?  Only with narrow relations and no bias.

    Forward and backward at t = 1024 (b = 4, h = 8, d = 32, float32, one core), CPU seconds of tiles over those of the
    kernel, causal and full.  8 relations of width 1: 1.4 and 1.9; 64: 1.9 and 2.6; 16 of width 2: 1.1 causal; 2 of
    width 8: 1.0 and 1.4; 8 of width 4: 0.9 and 1.3; 8 of width 32: 0.2 and 0.3.
    """
    assert inputs.q_rel is not None
    (r, p), d = inputs.q_rel.shape[2:], inputs.q.shape[-1]
    return inputs.bias is None and (p == 1 or (r * p <= d and (p == 2 or not inputs.causal)))


def forward(
    q: Tensor,
    k: Tensor,
    q_rel: Tensor,
    k_rel: Tensor,
    symbols: Tensor,
    relation_weight: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    relation_act: str = "identity",
) -> Tensor:
    """Relational attention as few calls of `scaled_dot_product_attention`, with relation keys among the values."""
    inputs = Inputs(q, k, symbols, bias, mask, keep, causal, window, cu_seqlens, act=relation_act)
    refuse("relational_attention", "sdpa", refusal(inputs))
    h, p, e = q.shape[2], q_rel.shape[3], symbols.shape[-1]
    keys = k_rel.flatten(2).unsqueeze(2).expand(-1, -1, h, -1)
    values = torch.cat((share(symbols, h), keys), -1).split(WIDTH, dim=-1)
    read = torch.cat(
        [
            fused(q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=scale)
            for v in values
        ],
        -1,
    )
    related = einsum(read[..., e:].unflatten(3, (-1, p)), q_rel * p**-0.5, "b t h r p, b t r p -> b t h r")
    return read[..., :e] + einsum(relation_weight, related, "h e r, b t h r -> b t h e")
