"""Relational attention; polyhead/ops/relational/reference.py has the equation."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import any_head, code, drop, finite_bias, inner, relate, retrieve, zero_hidden_keys
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    a = drop(code(call), call.keep)
    _, mask = finite_bias(call)
    k_rel = zero_hidden_keys(mask, call.k_rel) if call.act == "softmax" else call.k_rel
    products = inner(call.q_rel, k_rel)
    relations = relate(products, call.act, any_head(mask)).astype(call.q.dtype)
    related = jnp.einsum("b h t s, b r t s -> b t h r", a, relations)
    return retrieve(a, call.v) + jnp.einsum("h e r, b t h r -> b t h e", call.relation_weight, related)


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

    Arguments and errors are those of `polyhead.ops.relational_attention`.  Static under jit: causal, window, impl,
    relation_act.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(
        q, k, symbols, bias, masks, keep, scale,
        q_rel=q_rel, k_rel=k_rel, relation_weight=relation_weight, act=relation_act,
    )  # fmt: skip
    return compute("relational_attention", reference, impl, call)
