"""Normalisation of the last dimension, computed in at least float32.

rms_norm(x)   = x / sqrt(mean(x^2) + eps) * weight                    (Zhang and Sennrich 2019, eq. 4)
layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias    (Ba et al. 2016; var divides by the width)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array
from polyhead.jaxside.latent_code import wide
from polyhead.spec.shapes import shaped


@shaped
def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"] | None, eps: float = 1e-5) -> Float[Array, "... d"]:
    """Divide each vector by its root mean square: `x / sqrt(mean(x^2) + eps) * weight`; eps is inside the root.

    float16 and bfloat16 are computed in float32, gain included, and rounded once at the end.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.array([3.0, 4.0]), None, eps=0.0)       # root mean square sqrt(12.5)
    Array([0.8485..., 1.1313...], dtype=float32)
    """
    x = jnp.asarray(x)
    square = jnp.square(wide(x)).mean(-1, keepdims=True)
    return _affine(wide(x) * jax.lax.rsqrt(square + eps), weight, None).astype(x.dtype)


@shaped
def layer_norm(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "... d"]:
    """Shift each vector to mean 0 and scale it to variance 1, then `* weight + bias`.

    float16 and bfloat16 are computed in float32 and rounded once at the end.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.array([1.0, 3.0]), None, eps=0.0)
    Array([-1.,  1.], dtype=float32)
    """
    x = jnp.asarray(x)
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return _affine(scaled, weight, bias).astype(x.dtype)


def _affine(x: jax.Array, weight: Array | None, bias: Array | None) -> jax.Array:
    x = x if weight is None else x * jnp.asarray(weight, x.dtype)
    return x if bias is None else x + jnp.asarray(bias, x.dtype)
