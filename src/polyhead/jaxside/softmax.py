"""Softmax attention: every head mixes values with weights that sum to one over the keys.

    out_ih = sum_j a_hij v_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)

Vaswani et al. 2017, "Attention is all you need", eq. 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside import sdpa
from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Packed, Scale
from polyhead.jaxside.dispatch import Impl, compute
from polyhead.jaxside.latent_code import code, drop, row_softmax, share
from polyhead.jaxside.tiles import blocked
from polyhead.spec.shapes import shaped


def reference(x: AttentionCall) -> jax.Array:
    """The equation, literally."""
    a = drop(code(x), x.keep)
    return jnp.einsum("b h t s, b s h e -> b t h e", a, share(x.v, x.q.shape[2]))


IMPLS = {
    "blocked": blocked(reference, row_softmax),
    "sdpa": Impl(sdpa.forward, sdpa.unsupported_reason),
    "reference": Impl(reference),
}


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
    `window`: only keys less than `window` positions away; the last query is aligned with the last key. `cu_seqlens`:
    the single sample is several packed sequences, masked from one another. Raises ValueError if an explicit impl cannot
    take the inputs. Static under jit: causal, window, impl. Vaswani et al. 2017, eq. 1.
    """
    given = AttentionCall(q, k, v, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window)
    return compute("softmax_attention", IMPLS, impl, given)
