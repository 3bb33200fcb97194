"""Relational cross-attention with a softmax through PyTorch's fused kernels: it is softmax attention to symbols."""

from torch import Tensor

from polyhead.ops.custom_op_rules import backward_once
from polyhead.ops.latent_code import Inputs
from polyhead.ops.tiles import fused, refuse


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if inputs.act != "softmax":
        return f"takes act='softmax' only, not {inputs.act!r}"
    return "takes symbols by key only" if inputs.symbols.ndim == 3 else backward_once(inputs)


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference?  As for softmax attention."""
    return inputs.bias is None or inputs.q.shape[1] * inputs.k.shape[1] >= 256 * 256


def forward(
    q: Tensor,
    k: Tensor,
    symbols: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    act: str = "softmax",
) -> Tensor:
    """Relational cross-attention as one call of `scaled_dot_product_attention`."""
    refuse(
        "abstractor_attention",
        "sdpa",
        refusal(Inputs(q, k, symbols, bias, mask, keep, causal, window, cu_seqlens, act=act)),
    )
    return fused(q, k, symbols, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=scale)
