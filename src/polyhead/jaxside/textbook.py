"""The parts of a transformer in textbook form; attention takes (..., t, d) arrays without heads.

softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x)
silu(x)      = x * sigmoid(x)
attention    = softmax(q k^T / sqrt(d)) v                             (Vaswani et al. 2017, eq. 1)
swiglu(x)    = W2 (silu(W1 x) * W3 x)                                 (Shazeer 2020)
rms_norm(x)   = x / sqrt(mean(x^2) + eps) * weight                    (Zhang and Sennrich 2019, eq. 4)
layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias    (Ba et al. 2016; var divides by the width)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from polyhead.jaxside.call import Array, scaled
from polyhead.jaxside.latent_code import softmax_visible, wide
from polyhead.spec.shapes import shaped


@shaped
def softmax(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """`exp(x - max x)` divided by its sum along `dim`, computed in at least float32: no finite logit overflows.

    A slice of -inf only gives NaN, as in PyTorch.  Attention knows its mask and gives 0 there.  Raises ValueError for a
    `dim` out of range.

    >>> import jax.numpy as jnp
    >>> softmax(jnp.array([1e4, 1e4, -1e4]), 0)
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    num_dims = np.ndim(x)
    rank = max(num_dims, 1)
    if not -rank <= dim < rank:
        shape = tuple(x.shape)
        raise ValueError(f"softmax: dim must be in [{-num_dims}, {num_dims}) for x of shape {shape} but is {dim}")
    x = jnp.asarray(x)
    if not num_dims:
        return jnp.ones_like(x)
    return jax.nn.softmax(wide(x), axis=dim).astype(x.dtype)


@shaped
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * sigmoid(x)`, also called swish (Hendrycks and Gimpel 2016)."""
    return jax.nn.silu(jnp.asarray(x))


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
    up = jnp.einsum("... m, f m -> ... f", x, w1)
    gate = jnp.einsum("... m, f m -> ... f", x, w3)
    return jnp.einsum("... f, m f -> ... m", jax.nn.silu(up) * gate, w2)


@shaped
def scaled_dot_product_attention(
    q: Float[Array, "... t d"],
    k: Float[Array, "... s d"],
    v: Float[Array, "... s e"],
    mask: Bool[Array, "... #t #s"] | None = None,
) -> Float[Array, "... t e"]:
    """`softmax(q k^T / sqrt(d)) v`; batch dimensions broadcast; `mask` is True where query t may attend to key s.

    A query without a visible key gets exactly 0, and its gradient is never NaN.

    Raises ValueError for sizes, batch dimensions or dtypes that do not match, and for a mask that is not boolean.

    >>> import jax.numpy as jnp
    >>> q, k, v = jnp.zeros((1, 2)), jnp.zeros((3, 2)), jnp.array([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(q, k, v, jnp.array([[True, True, False]]))
    Array([[1.5]], dtype=float32)
    """
    if not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise ValueError(f"scaled_dot_product_attention: q, k and v must share a dtype but are {dtypes}")
    shapes = [tuple(array.shape[:-2]) for array in (q, k, v)]
    if mask is not None:
        shapes.append(tuple(mask.shape[:-2]))
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(map(str, shapes))
        raise ValueError(f"scaled_dot_product_attention: batch dimensions do not broadcast: {listed}") from None
    q = jnp.asarray(q)
    k = jnp.asarray(k)
    v = jnp.asarray(v)
    if mask is not None:
        # NaN in a key that no query reads would be multiplied by 0.
        mask = jnp.asarray(mask)
        is_read = jnp.broadcast_to(mask, (*mask.shape[:-2], q.shape[-2], k.shape[-2])).any(-2)[..., None]
        k = jnp.where(is_read, k, 0)
        v = jnp.where(is_read, v, 0)
    exact = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("... t d, ... s d -> ... t s", scaled(q, q.shape[-1] ** -0.5), k, preferred_element_type=exact)
    code = softmax_visible(scores, mask, -1).astype(q.dtype)
    return jnp.einsum("... t s, ... s e -> ... t e", code, v)


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
    """
    x = jnp.asarray(x)
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return _affine(scaled, weight, bias).astype(x.dtype)


def _affine(x: jax.Array, weight: Array | None, bias: Array | None) -> jax.Array:
    if weight is not None:
        x = x * jnp.asarray(weight, x.dtype)
    if bias is not None:
        x = x + jnp.asarray(bias, x.dtype)
    return x
