"""Softmax attention through PyTorch's fused kernels: O(t) memory where the kernel needs no bias."""

from torch import Tensor

from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.latent_code import Inputs
from polyhead.ops.tiles import fused, refuse


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels cannot take the inputs, or None.  Their own dropout draws its mask itself."""
    return backward_once(inputs)


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
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Softmax attention as one call of `scaled_dot_product_attention`."""
    refuse("softmax_attention", "sdpa", refusal(Inputs(q, k, v, bias, mask, keep, causal, window, cu_seqlens)))
    return fused(q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=scale)
