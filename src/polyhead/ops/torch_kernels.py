"""PyTorch's fused attention with what it lacks: causality aligned at the end, rows without keys, biases, lost NaN."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import dense, hidden_by, of_pairs, share, wide

VECTOR = 16
"""The most numbers in a vector register of a CPU: with fewer keys PyTorch's kernel loses NaN (torch 2.11)."""

MIN_BIASED_PAIRS = 256 * 256
"""The fewest pairs t s for which fused attention is no slower than the reference with a bias: it takes PyTorch's slow
path."""


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """`F.scaled_dot_product_attention` on (b h t d) tensors, with NaN for each query that sees a score of NaN.

    On a CPU and with few keys, PyTorch returns 0 for a query without a score that is a number.  Compiled and exported
    models keep that: one graph is for all lengths.
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if torch.compiler.is_compiling() or q.device.type != "cpu" or k.shape[-2] >= VECTOR:
        return out
    # 0 * NaN is NaN: the factor brings it back without a branch on data.
    with torch.no_grad():
        is_lost = (q @ k.mT).isnan()  # (b h t s)
        if causal:
            is_lost = is_lost.tril()
        if mask is not None:
            visible = mask if mask.dtype == torch.bool else mask != -math.inf
            is_lost = is_lost & visible
        is_lost = is_lost.any(-1, keepdim=True)  # (b h t 1)
        factor = torch.ones_like(is_lost, dtype=out.dtype).masked_fill_(is_lost, math.nan)
    return out * factor  # the gradient of such a query becomes NaN, too


def fused_attention(call: AttentionCall) -> Tensor:
    """Softmax attention by PyTorch's kernels.

    The kernels align a causal mask with the first key, are slow for unequal widths of keys and values, and leave rows
    without keys undefined.  This function corrects all three.
    """
    (t, s), h, e = call.lengths, call.q.shape[2], call.v.shape[-1]
    scale, masks = call.score_scale, call.masks
    causal = masks.is_causal_for(t)
    # With unequal widths PyTorch silently takes an O(t^2) path.  Padding with zeros changes neither scores nor sums.
    width = max(call.q.shape[-1], e)
    q = _pad(call.q, width).transpose(1, 2)
    k = _pad(share(call.k, h), width).transpose(1, 2)
    v = _pad(share(call.v, h), width).transpose(1, 2)
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels multiply the -inf of their own causal mask by the scale

    # The fast path of PyTorch: no mask at all, or the causal one that it makes itself.
    if call.bias is None and masks.is_at_most_causal and (not causal or t == s):
        out = torch_attention(q, k, v, causal=causal, scale=scale)
    else:
        visible = replace(masks, causal=causal).visible(t, s, q.device)
        out = _masked_attention(q, k, v, call.bias, visible, scale)
    return out[..., :e].transpose(1, 2)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float
) -> Tensor:
    """Attention with a mask or a bias; a row without keys gets 0."""
    t, s = q.shape[2], k.shape[2]
    is_empty_row = None
    if visible is not None:
        visible = of_pairs(visible)
        # A row without keys would be 0 / 0.  It attends to all keys, and its result and its gradient are set to 0.
        is_empty_row = ~visible.any(-1, keepdim=True)
        visible = (visible | is_empty_row).expand(*visible.shape[:2], t, s)
    attn_mask = visible
    if bias is not None:
        hidden, bias = hidden_by(bias), dense(bias, t, s)
        if bias.ndim == 3:
            bias = bias[None]
        attn_mask = bias if visible is None else bias.masked_fill(~visible, -math.inf)
        if hidden is not None:  # the bias, too, may leave a row without keys
            has_no_score = (attn_mask == -math.inf).all(-1, keepdim=True)  # (b|1 h t 1)
            attn_mask = attn_mask.masked_fill(has_no_score, 0)
            is_empty_row = has_no_score if is_empty_row is None else has_no_score | is_empty_row
        attn_mask = _narrow_bias(attn_mask, q.dtype)
    out = torch_attention(q, k, v, mask=attn_mask, scale=scale)
    if bias is not None and 0 in (*out.shape, s):
        out = out + 0 * bias.sum()  # from nothing the kernels make an output without a gradient for the bias
    return out if is_empty_row is None else out.masked_fill(is_empty_row, 0)


def _narrow_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias with at least one finite number in each row, in the dtype of the kernels."""
    if bias.numel():
        # A softmax ignores what all keys of a query share.  Narrowed with it, their differences would be lost; and the
        # kernels' backward pass has the logarithm of a sum, which -1e9 at all keys would round away.
        bias = wide(bias)
        bias = bias - bias.detach().amax(-1, keepdim=True)
    return bias.to(dtype)
