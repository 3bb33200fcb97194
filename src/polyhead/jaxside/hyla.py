"""HYLA, hypernetwork linear attention; polyhead/ops/hyla/reference.py has the equations."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale
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

    Arguments and errors are those of `polyhead.ops.hyla`.  Static under jit: causal, window, impl, normalise, act.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, value_weight, normalise=normalise, act=act)
    return compute("hyla", reference, impl, call)
