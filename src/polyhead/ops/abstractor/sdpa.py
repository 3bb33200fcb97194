"""Relational cross-attention with a softmax through PyTorch's fused kernels: it is softmax attention to symbols."""

from polyhead.ops.call import AttentionCall
from polyhead.ops.kernel import unsupported_by_fused_attention
from polyhead.ops.softmax.sdpa import forward, preferred

__all__ = ["forward", "preferred", "unsupported_reason"]


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if call.act != "softmax":
        return f"takes act='softmax' only, not {call.act!r}"
    if call.symbols.ndim == 3:
        return "takes symbols by key only"
    return unsupported_by_fused_attention(call)
