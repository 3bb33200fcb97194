"""Softmax attention through PyTorch's fused kernels: O(t) memory where the kernel needs no bias."""

from polyhead.ops.call import AttentionCall
from polyhead.ops.kernel import unsupported_by_fused_attention
from polyhead.ops.softmax.reference import unsupported_extras
from polyhead.ops.torch_kernels import MIN_BIASED_PAIRS, fused_attention

forward = fused_attention


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None.  They take no `keep`: their dropout draws its own mask."""
    return unsupported_extras(call) or unsupported_by_fused_attention(call)


def preferred(call: AttentionCall) -> bool:
    """Whether they were measured to be no slower than the reference; with a learned bias only for many pairs."""
    return call.bias is None or call.q.shape[1] * call.k.shape[1] >= MIN_BIASED_PAIRS
