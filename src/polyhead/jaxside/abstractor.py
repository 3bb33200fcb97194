"""Relational cross-attention of the Abstractor: attention whose values are symbols.

    out_ih = sum_j act(s_ij)_h symbols_jh,      s_hij = q_ih . k_jh / sqrt(d) + bias_hij

With the softmax as `act`, the inner products select a symbol; with a pointwise activation they are the relations.
Altabaa, Webb, Cohen and Lafferty 2024, "Abstractors and relational cross-attention".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import drop, logits, relate, retrieve
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    scores, mask = logits(call)
    a = relate(scores, call.act, mask).astype(call.q.dtype)
    if mask is not None:
        a = jnp.where(mask, a, 0)
    return retrieve(drop(a, call.keep), call.v)


@shaped
def abstractor_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    symbols: Symbols,
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: Scale = None,
    keep: Keep | None = None,
    impl: str = "auto",
    act: str = "softmax",
) -> Float[Array, "b t h e"]:
    """Relational cross-attention, `out_h = sum_s act(q k^T / sqrt(d))_h symbols_h`.

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); act: spec.RELATION_ACTS, applied
    to the scores with their bias; only softmax normalises. A masked pair counts 0; a query without a visible key
    gets exactly 0. `window` and `cu_seqlens` are those of `softmax_attention`. Static under jit: causal, window,
    impl, act. Altabaa et al. 2024.
    """
    call = AttentionCall(q, k, symbols, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window, act=act)
    return compute("abstractor_attention", reference, impl, call)
