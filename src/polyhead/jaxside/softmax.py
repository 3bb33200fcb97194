"""Softmax attention; polyhead/ops/softmax/reference.py has the equation."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import code, drop, share
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    a = drop(code(call), call.keep)
    return jnp.einsum("b h t s, b s h e -> b t h e", a, share(call.v, call.q.shape[2]))


@shaped
def softmax_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g e"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: Scale = None,
    keep: Keep | None = None,
    impl: str = "auto",
) -> Float[Array, "b t h e"]:
    """Softmax attention, `out = softmax(q k^T / sqrt(d) + bias) v` per head.

    Arguments and errors are those of `polyhead.ops.softmax_attention`, without `softcap` and `sinks`.  Static under
    jit: causal, window, impl.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale)
    return compute("softmax_attention", reference, impl, call)
