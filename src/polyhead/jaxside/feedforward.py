"""A feed-forward layer, which a block applies to each token separately.

swiglu(x) = W2 (silu(W1 x) * W3 x)                                    (Shazeer 2020)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array
from polyhead.spec.shapes import shaped


@shaped
def swiglu(
    x: Float[Array, "... m"], w1: Float[Array, "f m"], w2: Float[Array, "m f"], w3: Float[Array, "f m"]
) -> Float[Array, "... m"]:
    """`w2 (silu(w1 x) * w3 x)`, without biases; weights are [out, in], as in `polyhead.SwigluLayer`.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 1))
    >>> swiglu(jnp.array([20.0]), one, 2 * one, 3 * one)
    Array([2400.], dtype=float32)
    """
    up, gate = jnp.einsum("... m, f m -> ... f", x, w1), jnp.einsum("... m, f m -> ... f", x, w3)
    return jnp.einsum("... f, m f -> ... m", jax.nn.silu(up) * gate, w2)
