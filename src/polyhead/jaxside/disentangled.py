"""Disentangled relational cross-attention: the code selects a symbol, and the head's own relation multiplies it.

    out_ih  = sum_j a_hij rel_hij symbols_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_hij = act(q_rel_ih . k_rel_jh / sqrt(p))

The product form of relational attention, from an earlier draft of Altabaa and Lafferty 2024 (arXiv 2405.16727).
"""

import jax
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Logits, Mask, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import Impl, compute
from polyhead.jaxside.latent_code import code, drop, logits, products, relate, retrieve, share, visible
from polyhead.jaxside.tiles import blocked
from polyhead.spec.shapes import shaped


def compared(x: AttentionCall) -> tuple[jax.Array, jax.Array | None]:
    """(b h t s) products of relation queries and keys, and the mask of a softmax over them."""
    return products(x.q_rel, share(x.k_rel, x.q.shape[2])), visible(x)


def reference(x: AttentionCall) -> jax.Array:
    """The equation, literally."""
    inner, look = compared(x)
    both = code(x) * relate(inner, x.act, look, x.total_rel)
    return retrieve(drop(both.astype(x.q.dtype), x.keep), x.v)


def _rows(x: AttentionCall) -> dict[str, Logits]:
    return {"total": logits, "total_rel": compared} if x.act == "softmax" else {"total": logits}


IMPLS = {"blocked": blocked(reference, _rows), "reference": Impl(reference)}


@shaped
def disentangled_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    q_rel: Float[Array, "b t h p"],
    k_rel: Float[Array, "b s g p"],
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
    relation_act: str = "identity",
) -> Float[Array, "b t h e"]:
    """Disentangled relational attention, `out_h = sum_s a_h act(q_rel_h k_rel_h) symbols_h`.

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); relation_act: spec.RELATION_ACTS, a
    softmax runs over the visible keys. `bias` and `mask` act on the scores; `keep` multiplies the product. A query
    without a visible key gets exactly 0. `window`: only keys less than `window` positions away; the last query is
    aligned with the last key. `cu_seqlens`: the single sample is several packed sequences, masked from one another.
    Raises ValueError if an explicit impl cannot take the inputs. Static under jit: causal, window, impl, relation_act.
    Altabaa and Lafferty 2024, an earlier draft.
    """
    given = AttentionCall(
        q, k, symbols, bias, mask, keep, cu_seqlens, scale, q_rel=q_rel, k_rel=k_rel, causal=causal, window=window,
        act=relation_act,
    )  # fmt: skip
    return compute("disentangled_attention", IMPLS, impl, given)
