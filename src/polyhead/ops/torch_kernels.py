"""PyTorch's fused attention, with NaN where it loses one."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR = 16
"""The most numbers in a vector register of a CPU: with fewer keys PyTorch's kernel loses NaN (torch 2.11)."""


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` on (b h t d) tensors, with NaN for each query that sees a score of NaN.

    On a CPU and with few keys, PyTorch returns 0 for a query without a score that is a number.  Compiled and exported
    models keep that: one graph is for all lengths.
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if torch.compiler.is_compiling() or q.device.type != "cpu" or k.shape[-2] >= VECTOR:
        return out
    with torch.no_grad():
        lost = (q @ k.mT).isnan()
        if causal:
            lost = lost.tril()
        if mask is not None:
            lost = lost & (mask if mask.dtype == torch.bool else mask != -math.inf)
        lost = lost.any(-1, keepdim=True)
        factor = torch.ones_like(lost, dtype=out.dtype).masked_fill_(lost, math.nan)
    return out * factor  # the gradient of such a query becomes NaN, too
