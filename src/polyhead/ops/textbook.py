"""Attention in textbook form: (..., t, d) tensors, any number of batch dimensions, no heads.

softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x)
silu(x)      = x * sigmoid(x)
attention    = softmax(q k^T / sqrt(d)) v                             (Vaswani et al. 2017, eq. 1)
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.ops.kernel import needs_more_than_one_backward
from polyhead.ops.latent_code import is_known_finite, wide
from polyhead.ops.precision import casting
from polyhead.ops.torch_kernels import torch_attention
from polyhead.spec.shapes import shaped


@shaped
def softmax(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """`exp(x - max x)` divided by its sum along `dim`, computed in at least float32: no finite logit overflows.

    A slice of -inf only gives NaN, as in PyTorch.  Attention knows its mask and gives 0 there.  Raises ValueError for a
    `dim` out of range.

    >>> softmax(torch.tensor([1e4, 1e4, -1e4]), 0)
    tensor([0.5000, 0.5000, 0.0000])
    """
    if not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        raise ValueError(
            f"softmax: dim must be in [{-x.dim()}, {x.dim()}) for x of shape {tuple(x.shape)} but is {dim}"
        )
    return torch.softmax(x, dim).to(x.dtype)


@shaped
def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x * sigmoid(x)`, also called swish (Hendrycks and Gimpel 2016).

    >>> silu(torch.tensor([-20.0, 0.0, 20.0]))
    tensor([-4.1223e-08,  0.0000e+00,  2.0000e+01])
    """
    return F.silu(x)


@shaped
def scaled_dot_product_attention(
    q: Float[Tensor, "... t d"],
    k: Float[Tensor, "... s d"],
    v: Float[Tensor, "... s e"],
    mask: Bool[Tensor, "... #t #s"] | None = None,
) -> Float[Tensor, "... t e"]:
    """`softmax(q k^T / sqrt(d)) v`; batch dimensions broadcast; `mask` is True where query t may attend to key s.

    A query without a visible key gets exactly 0, and its gradient is never NaN.

    Raises ValueError for sizes, batch dimensions or dtypes that do not match, and for a mask that is not boolean.

    >>> q, k, v = torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(q, k, v, torch.tensor([[True, True, False]]))
    tensor([[1.5000]])
    """
    with casting(q, k, v) as (q, k, v):
        batch = _batch(q, k, v, mask)
        if mask is None:
            return _fused(q, k, v, None, batch)
        mask = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])
        # NaN in a key that no query reads would be multiplied by 0.
        is_read = mask.any(-2)[..., None]
        k = k if is_known_finite(k) else torch.where(is_read, k, 0)
        v = v if is_known_finite(v) else torch.where(is_read, v, 0)
        # A row without a key is unmasked before the softmax and zeroed after it, so no kernel computes 0 / 0.
        is_empty_row = ~mask.any(-1, keepdim=True)
        return _fused(q, k, v, mask | is_empty_row, batch).masked_fill(is_empty_row, 0.0)


def _batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    who = "scaled_dot_product_attention"
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{who}: q, k and v must share a dtype but are {q.dtype}, {k.dtype} and {v.dtype}")
    shapes = [tuple(x.shape[:-2]) for x in (q, k, v, mask) if x is not None]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(f"{who}: batch dimensions do not broadcast: {', '.join(map(str, shapes))}") from None


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, batch: tuple[int, ...]) -> Tensor:
    """PyTorch's fast path takes exactly two batch dimensions, so ours are folded into the first."""
    if needs_more_than_one_backward():
        scores = wide(q @ k.mT) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1).to(v.dtype) @ v
    count = math.prod(batch)
    q, k, v = (x.expand(*batch, *x.shape[-2:]).reshape(count, 1, *x.shape[-2:]) for x in (q, k, v))
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(*batch, *mask.shape[-2:]).reshape(count, 1, *mask.shape[-2:])
    return torch_attention(q, k, v, mask=mask).reshape(*batch, q.shape[-2], v.shape[-1])
