"""Relational attention through PyTorch's fused kernels, for relations without an activation: an exact reduction.

    sum_j a_hij (q_rel_ir . k_rel_jr)  =  q_rel_ir . sum_j a_hij k_rel_jr

so the kernel takes relation keys as further values, and each sum is then multiplied by the relation query.  Altabaa and
Lafferty 2024 (arXiv 2405.16727), with the identity.
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.kernel import unsupported_by_fused_attention
from polyhead.ops.latent_code import share
from polyhead.ops.torch_kernels import fused_attention

WIDTH = 256
"""The largest width of values in one call: the limit of flash kernels."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if call.act != "identity":
        return f"takes relation_act='identity' only, not {call.act!r}"
    if call.symbols.ndim == 3:
        return "takes symbols by key only"
    return unsupported_by_fused_attention(call)


def preferred(call: AttentionCall) -> bool:
    """Whether they are no slower than the reference and tiles.

    On an accelerator there is no faster code.  On a CPU it was measured for narrow relations without a bias.
    """
    if call.q.device.type != "cpu":
        return True
    r, p = call.relation_qk[0].shape[2:]
    is_narrow = p == 1 or (r * p <= call.q.shape[-1] and (p == 2 or not call.masks.causal))
    return call.bias is None and is_narrow


def forward(call: AttentionCall) -> Tensor:
    """Relational attention by a few calls of `scaled_dot_product_attention`, with relation keys among the values."""
    (q_rel, k_rel), h, e = call.relation_qk, call.q.shape[2], call.symbols.shape[-1]
    p = q_rel.shape[3]
    relation_keys = k_rel.flatten(2).unsqueeze(2).expand(-1, -1, h, -1)  # (b s h r*p)
    values = torch.cat((share(call.symbols, h), relation_keys), -1)  # (b s h e+r*p)
    sums = []
    for part in values.split(WIDTH, dim=-1):
        sums.append(fused_attention(replace(call, v=part)))
    retrieved = torch.cat(sums, -1)  # (b t h e+r*p)
    related = torch.einsum("b t h r p, b t r p -> b t h r", retrieved[..., e:].unflatten(3, (-1, p)), q_rel * p**-0.5)
    return retrieved[..., :e] + torch.einsum("h e r, b t h r -> b t h e", call.relation_map, related)
