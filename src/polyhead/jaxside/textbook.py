"""Attention in textbook form: (..., t, d) arrays, any number of batch dimensions, no heads.

softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x)
silu(x)      = x * sigmoid(x)
attention    = softmax(q k^T / sqrt(d)) v                             (Vaswani et al. 2017, eq. 1)
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
    rank = max(np.ndim(x), 1)
    if not -rank <= dim < rank:
        raise ValueError(
            f"softmax: dim must be in [{-np.ndim(x)}, {np.ndim(x)}) for x of shape {tuple(x.shape)} but is {dim}"
        )
    x = jnp.asarray(x)
    return jax.nn.softmax(wide(x), axis=dim).astype(x.dtype) if x.ndim else jnp.ones_like(x)


@shaped
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * sigmoid(x)`, also called swish (Hendrycks and Gimpel 2016).

    >>> import jax.numpy as jnp
    >>> silu(jnp.array([0.0, 20.0]))
    Array([ 0., 20.], dtype=float32)
    """
    return jax.nn.silu(jnp.asarray(x))


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
    _check_batch(q, k, v, mask)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    if mask is not None:  # NaN in a key that no query reads would be multiplied by 0
        read = jnp.broadcast_to(mask, (*mask.shape[:-2], q.shape[-2], k.shape[-2])).any(-2)[..., None]
        k, v = (jnp.where(read, x, 0) for x in (k, v))
    exact = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("... t d, ... s d -> ... t s", scaled(q, q.shape[-1] ** -0.5), k, preferred_element_type=exact)
    code = softmax_visible(scores, None if mask is None else jnp.asarray(mask), -1).astype(q.dtype)
    return jnp.einsum("... t s, ... s e -> ... t e", code, v)


def _check_batch(q: Array, k: Array, v: Array, mask: Array | None) -> None:
    who = "scaled_dot_product_attention"
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{who}: q, k and v must share a dtype but are {q.dtype}, {k.dtype} and {v.dtype}")
    shapes = [tuple(x.shape[:-2]) for x in (q, k, v, mask) if x is not None]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"{who}: batch dimensions do not broadcast: {', '.join(map(str, shapes))}") from None
