"""Relational attention: a head retrieves symbols, and the relations of the receiver to the senders it attends to.

    out_ih  = sum_j a_hij symbols_jh + W_h sum_j a_hij rel_ij,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_ijr = act(q_rel_ir . k_rel_jr / sqrt(p))                    r relations, the same for all heads

The features of the senders are never retrieved; only their relations to the receiver are.  Altabaa and Lafferty 2024,
"Disentangling and integrating relational and sensory information in transformer architectures" (arXiv 2405.16727).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import code, drop, products, relate, retrieve, visible, visible_to_any_head
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    a = drop(code(call), call.keep)
    inner = products(call.q_rel, call.k_rel)
    relations = relate(inner, call.act, visible_to_any_head(visible(call))).astype(call.q.dtype)
    retrieved = jnp.einsum("b h t s, b r t s -> b t h r", a, relations)
    return retrieve(a, call.v) + jnp.einsum("h e r, b t h r -> b t h e", call.relation_weight, retrieved)


@shaped
def relational_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    q_rel: Float[Array, "b t r p"],
    k_rel: Float[Array, "b s r p"],
    symbols: Symbols,
    relation_weight: Float[Array, "h e r"],
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
    """Relational attention, `out_h = sum_s a_h symbols_h + W_h sum_s a_h act(q_rel k_rel)`.

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); relation_act:
    spec.RELATION_ACTS, a softmax runs over the visible keys. `bias` and `mask` act on the scores; `keep` multiplies
    the code at both uses. A query without a visible key gets exactly 0. `window` and `cu_seqlens` are those of
    `softmax_attention`. Static under jit: causal, window, impl, relation_act. Altabaa and Lafferty 2024.
    """
    call = AttentionCall(
        q, k, symbols, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window,
        q_rel=q_rel, k_rel=k_rel, relation_weight=relation_weight, act=relation_act,
    )  # fmt: skip
    return compute("relational_attention", reference, impl, call)
