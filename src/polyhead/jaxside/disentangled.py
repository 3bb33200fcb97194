"""Disentangled relational cross-attention; polyhead/ops/disentangled/op.py has the equation."""

import jax
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale, Symbols
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import code, drop, finite_bias, inner, relate, retrieve, share
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    products = inner(call.q_rel, share(call.k_rel, call.q.shape[2]))
    _, mask = finite_bias(call)
    product = code(call) * relate(products, call.act, mask)
    return retrieve(drop(product.astype(call.q.dtype), call.keep), call.v)


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

    Arguments and errors are those of `polyhead.ops.disentangled_attention`.  Static under jit: causal, window, impl,
    relation_act.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, symbols, bias, masks, keep, scale, q_rel=q_rel, k_rel=k_rel, act=relation_act)
    return compute("disentangled_attention", reference, impl, call)
