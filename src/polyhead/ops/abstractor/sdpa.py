"""Relational cross-attention with a softmax through PyTorch's fused kernels: it is softmax attention to symbols."""

from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.tiles import BIASED, fused


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if x.act != "softmax":
        return f"takes act='softmax' only, not {x.act!r}"
    return "takes symbols by key only" if x.symbols.ndim == 3 else backward_once(x)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of the kernel (one core, float32, b 8, 8 heads of
    width 8), median of seven.  Full: 1.1 at t = 32, 1.4 at t = 128, 1.1 at t = 256; causal: 1.7, 2.0, 2.6.  With a
    bias, the kernel and so the limit are those of softmax attention.
    """
    return x.bias is None or x.q.shape[1] * x.k.shape[1] >= BIASED


def forward(x: AttentionCall) -> Tensor:
    """Relational cross-attention as one call of `scaled_dot_product_attention`."""
    return fused(x)
