"""Relational cross-attention of the Abstractor: attention whose values are symbols.

    out_ih = sum_j act(s_ij)_h symbols_jh,      s_hij = q_ih . k_jh / sqrt(d) + bias_hij

With the softmax as `act`, the inner products select a symbol; with a pointwise activation they are the relations.
Altabaa, Webb, Cohen and Lafferty 2024, "Abstractors and relational cross-attention".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside import sdpa
from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Logits, Mask, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import Impl, compute
from polyhead.jaxside.latent_code import drop, logits, relate, retrieve
from polyhead.jaxside.tiles import blocked
from polyhead.spec.shapes import shaped


def code(x: AttentionCall) -> jax.Array:
    """act(s) of all pairs (b h t s); 0 for masked pairs."""
    s, look = logits(x)
    a = relate(s, x.act, look, x.total).astype(x.q.dtype)
    return a if look is None else jnp.where(look, a, 0)


def reference(x: AttentionCall) -> jax.Array:
    """The equation, literally."""
    return retrieve(drop(code(x), x.keep), x.v)


def _rows(x: AttentionCall) -> dict[str, Logits]:
    return {"total": logits} if x.act == "softmax" else {}


def _unsupported_reason(x: AttentionCall) -> str | None:
    return sdpa.unsupported_reason(x) if x.act == "softmax" else f"takes act='softmax' only, not {x.act!r}"


IMPLS = {
    "blocked": blocked(reference, _rows),
    "sdpa": Impl(sdpa.forward, _unsupported_reason),
    "reference": Impl(reference),
}


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

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); act: spec.RELATION_ACTS, applied to
    the scores with their bias; only softmax normalises. A masked pair counts 0; a query without a visible key gets
    exactly 0. `window`: only keys less than `window` positions away; the last query is aligned with the last key.
    `cu_seqlens`: the single sample is several packed sequences, masked from one another. Raises ValueError if an
    explicit impl cannot take the inputs. Static under jit: causal, window, impl, act. Altabaa et al. 2024.
    """
    given = AttentionCall(
        q, k, symbols, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window, act=act,
    )  # fmt: skip
    return compute("abstractor_attention", IMPLS, impl, given)
