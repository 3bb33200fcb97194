"""HYLA, hypernetwork linear attention: the latent code of a pair of tokens makes a small value network for this pair.

    z_ij   = act(sum_h a_hij v_jh)                      the pair's hidden layer
    out_ih = sum_j a_hij z_ij                           its output layer; W_out_h follows in the layer
    z_ij   = act(sum_h a_hij W_h act(sum_h a_hij v_jh)) with a deep value network

with a_hij the rms over heads of the scores.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6; eq. 10 (deep).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Packed, Scale
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import ACTIVATIONS, code, drop, share
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> jax.Array:
    """Equation 6 (or 10), literally."""
    phi = ACTIVATIONS[call.act]
    a = drop(code(call), call.keep)
    z = phi(jnp.einsum("b h t s, b s h e -> b t s e", a, share(call.v, call.q.shape[2])))
    if call.value_weight is not None:
        # The second layer has a matrix of its own for each pair: the sum of all heads' by its code.
        z = phi(jnp.einsum("b h t s, h f e, b t s e -> b t s f", a, call.value_weight, z))
    return jnp.einsum("b h t s, b t s e -> b t h e", a, z)


@shaped
def hyla(
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
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Float[Array, "h e e"] | None = None,
) -> Float[Array, "b t h e"]:
    """HYLA, `out_h = sum_s a_h act(sum_h a_h v_h)`: the code of a pair configures the value network of the pair.

    normalise: how scores become the code (spec.NORMALISE); act: activation in the value network (spec.ACTS);
    value_weight: [head, out, in], one more layer, `act(sum_h a_h W_h z)`. `keep` multiplies the code at every use.
    A query without a visible key gets exactly 0. `window` and `cu_seqlens` are those of `softmax_attention`. Static
    under jit: causal, window, impl, normalise, act. Schug et al., eq. 6; eq. 10 with value_weight.
    """
    call = AttentionCall(
        q, k, v, bias, mask, keep, cu_seqlens, scale, causal=causal, window=window,
        value_weight=value_weight, normalise=normalise, act=act,
    )  # fmt: skip
    return compute("hyla", reference, impl, call)
