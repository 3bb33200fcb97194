"""Softmax attention through PyTorch's fused kernels: O(t) memory where the kernel needs no bias.

The kernels align a causal mask with the first key, want equal widths of keys and values and leave rows without keys
undefined; the wrapper repairs all three.
"""

import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.code import Inputs, dense, share, visible
from polyhead.ops.tiles import refuse


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels cannot take the inputs, or None.  Their own dropout draws its mask itself."""
    return "takes no keep" if inputs.keep is not None else None


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of the kernel (one core, float32, 8 heads).  No
    bias: 1.1 to 1.7 at t = 32 to 256.  A bias that is learned takes the kernel's slow path: 0.8 at t = 32, 1.0 at t =
    256.
    """
    return inputs.bias is None or inputs.q.shape[1] * inputs.k.shape[1] >= 256 * 256


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Softmax attention as one call of `scaled_dot_product_attention`."""
    refuse("softmax_attention", "sdpa", refusal(Inputs(q, k, v, bias, mask, keep, causal)))
    t, h, s, e = q.shape[1], q.shape[2], k.shape[1], v.shape[-1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Unequal widths fall silently to an O(t^2) path; zeros change neither the scores nor the sums.
    width = max(q.shape[-1], e)
    q, k, v = (_pad(x, width).transpose(1, 2) for x in (q, share(k, h), share(v, h)))
    if t == 1:
        causal = False  # a single query is the last one: it sees every key
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels multiply the -inf of their own causal mask by the scale
    if bias is None and mask is None and (not causal or t == s):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    else:
        out = _masked(q, k, v, bias, visible(mask, causal, t, s, q.device), scale)
    return out[..., :e].transpose(1, 2)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, look: Tensor | None, scale: float) -> Tensor:
    t, s = q.shape[2], k.shape[2]
    nowhere = None
    if look is not None:
        look = look.reshape((1,) * (4 - look.ndim) + look.shape)
        # A row without keys would be 0 / 0: let it look everywhere and erase the result, which also erases its
        # gradient.
        nowhere = ~look.any(-1, keepdim=True)
        look = (look | nowhere).expand(*look.shape[:2], t, s)
    attn_mask = look
    if bias is not None:
        bias = dense(bias, t, s).to(q.dtype)
        bias = bias if bias.ndim == 4 else bias[None]
        attn_mask = bias if look is None else bias.masked_fill(~look, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale)
    return out if nowhere is None else out.masked_fill(nowhere, 0)
