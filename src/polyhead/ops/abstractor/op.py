"""Relational cross-attention of the Abstractor: attention whose values are symbols.

    out_ih = sum_j act(s_ij)_h symbols_jh,      s_hij = q_ih . k_jh / sqrt(d) + bias_hij

With the softmax as `act`, the inner products select a symbol; with a pointwise activation they are the relations.
Altabaa, Webb, Cohen and Lafferty 2024, "Abstractors and relational cross-attention".
"""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.abstractor import sdpa
from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed, Symbols
from polyhead.ops.dispatch import Op, run
from polyhead.ops.latent_code import drop, products, relate, retrieve, with_bias
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import shaped


def code(call: AttentionCall) -> Tensor:
    """act(s) of all pairs (b h t s); 0 for masked pairs."""
    scores, visible = with_bias(products(call), call.bias, call.visible())
    a = relate(scores, call.act, visible).to(call.q.dtype)
    return a if visible is None else a.masked_fill(~visible, 0)


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    return retrieve(drop(code(call), call.keep), call.symbols)


ABSTRACTOR = Op(
    row=mechanism("abstractor_attention"),
    reference=reference,
    backends={"sdpa": sdpa, "blocked": tiled("abstractor_attention", reference)},
    code=code,
)


@shaped
def abstractor_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    symbols: Symbols,
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    keep: Keep | None = None,
    impl: str = "auto",
    act: str = "softmax",
) -> Float[Tensor, "b t h e"]:
    """Relational cross-attention, `out_h = sum_s act(q k^T / sqrt(d))_h symbols_h`.

    A masked pair counts 0, and a query without a visible key gets exactly 0.  Altabaa et al. 2024.  Other arguments and
    errors are those of `softmax_attention`.

    >>> abstractor_attention(q, k, symbols, causal=True, act="sigmoid")      # (b t h e)

    Args:
        symbols: Values by key, or by offset: row j - i + t - 1 is for query i and key j.
        act: Applied to the scores with their bias: a name of `spec.RELATION_ACTS`.  Only softmax normalises.
    """
    normalise = "softmax" if act == "softmax" else "identity"  # it tells tiles whether they need all keys
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, symbols, bias, masks, keep, scale, impl, normalise, act=act)
    return run(ABSTRACTOR, call)
