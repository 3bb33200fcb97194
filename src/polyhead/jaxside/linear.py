"""Linear attention; polyhead/ops/linear/reference.py has the equation."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import ACTIVATIONS, code, drop, share
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation, literally."""
    a = drop(code(call), call.keep)
    v = ACTIVATIONS[call.act](share(call.v, call.q.shape[2]))
    return jnp.einsum("b h t s, b s h e -> b t h e", a, v)


@shaped
def linear_attention(
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
    normalise: str = "identity",
    act: str = "identity",
) -> Float[Array, "b t h e"]:
    """Linear attention, `out = (q k^T / sqrt(d) + bias) act(v)` per head: no feature map, no division.

    Arguments and errors are those of `polyhead.ops.linear_attention`.  Static under jit: causal, window, impl,
    normalise, act.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, normalise=normalise, act=act)
    return compute("linear_attention", reference, impl, call)
