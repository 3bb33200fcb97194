"""Softmax attention through PyTorch's fused kernels: O(t) memory where the kernel needs no bias."""

from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.tiles import BIASED, fused


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None.  They take no `keep`: their dropout draws its own mask."""
    return backward_once(x)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of the kernel (one core, float32, 8 heads).  No
    bias: 1.1 to 1.7 at t = 32 to 256.  A bias that is learned takes the kernel's slow path: 0.8 at t = 32, 1.0 at t =
    256.
    """
    return x.bias is None or x.q.shape[1] * x.k.shape[1] >= BIASED


def forward(x: AttentionCall) -> Tensor:
    """Softmax attention as one call of `scaled_dot_product_attention`."""
    return fused(x)
