"""Softmax attention as one call of `jax.nn.dot_product_attention`, with our rows without keys.

There a query that may look nowhere gets the mean of all values, a causal mask is aligned with the first key, keys and
values must be equally wide, the softmax is in float32 whatever comes in, and float16 does not compile on the CPU: the
first three are repaired here, float64 and float16 are refused.
"""

import jax
import jax.numpy as jnp

from polyhead.jaxside.latent_code import AttentionCall, finite_bias


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the call cannot take the inputs, or None."""
    if x.keep is not None:
        return "takes no keep"
    if x.q.dtype == jnp.float64:
        return "takes no float64: its softmax is in float32"
    if x.q.dtype == jnp.float16:
        return "takes no float16: it does not compile on the CPU"
    return "takes symbols by key only" if x.v.ndim == 3 else None


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, causal, CPU seconds of the reference over those of the call (one core, float32, 8 heads): 0.9
    at t = 512, d = 16 and 1.0 at t = 1024, d = 32.  Tiles come first where they are faster.
    """
    return True


def forward(x: AttentionCall) -> jax.Array:
    """Softmax attention, or attention to symbols."""
    (t, s), (d, e) = x.lengths, (x.q.shape[-1], x.v.shape[-1])
    bias, look = finite_bias(x)
    q = x.q * (d**-0.5 if x.scale is None else jnp.asarray(x.scale, x.q.dtype))
    bias = None if bias is None else _four(bias)
    somewhere = None
    if look is not None:
        look = _four(jnp.broadcast_to(look, (*look.shape[:-2], t, s)))
        # A row without keys is opened before the softmax and closed after it, so that it has no gradient either.
        somewhere = look.any(-1, keepdims=True)
        look = look | ~somewhere
    q, k, v = (jnp.pad(a, (*((0, 0),) * 3, (0, max(d, e) - a.shape[-1]))) for a in (q, x.k, x.v))
    out = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=look, scale=1.0)[..., :e]
    return out if somewhere is None else jnp.where(jnp.swapaxes(somewhere, 1, 2), out, 0)


def _four(x: jax.Array) -> jax.Array:
    """(b h t s), as the call wants it."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
