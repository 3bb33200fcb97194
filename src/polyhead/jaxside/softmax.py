"""Softmax attention: every head mixes values with weights that sum to one over the keys.

    out_ih = sum_j a_hij v_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)

Vaswani et al. 2017, "Attention is all you need", eq. 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Packed, Scale
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

    Query head i reads group i // (h / g) of keys and values. A query without a visible key gets exactly 0.
    `window`: only keys less than `window` positions away; the last query is aligned with the last key.
    `cu_seqlens`: the single sample is several packed sequences, masked from one another. Static under jit: causal,
    window, impl. Vaswani et al. 2017, eq. 1.
    """
    call = AttentionCall(q, k, v, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window)
    return compute("softmax_attention", reference, impl, call)
