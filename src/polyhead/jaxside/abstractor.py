"""Relational cross-attention of the Abstractor; polyhead/ops/abstractor/op.py has the equation."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale, Symbols
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

    Arguments and errors are those of `polyhead.ops.abstractor_attention`.  Static under jit: causal, window, impl, act.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, symbols, bias, masks, keep, scale, act=act)
    return compute("abstractor_attention", reference, impl, call)
