"""Rotary position embedding; polyhead/ops/rope.py has the equation."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from polyhead.jaxside.call import Array
from polyhead.jaxside.latent_code import wide
from polyhead.spec import LAYOUTS
from polyhead.spec.shapes import check_number, one_of, shaped


@shaped
def rope(
    x: Float[Array, "... d"], positions: Int[Array, "..."], *, theta: float = 1e4, layout: str = "interleaved"
) -> Float[Array, "... d"]:
    """Rotate `x` by its positions: dot products of rotated vectors depend on positions only by their difference.

    Arguments are those of `polyhead.ops.rope`.  Positions may be traced, so their values are not checked; a negative
    position rotates the other way.  Static under jit: theta, layout.

    >>> import jax.numpy as jnp
    >>> rope(jnp.array([1.0, 0.0]), jnp.array(1))         # one pair, turned by one radian
    Array([0.540..., 0.841...], dtype=float32)
    """
    one_of("rope", "layout", layout, LAYOUTS)
    check_number("rope", "theta", theta, 0, above=True)
    x = jnp.asarray(x)
    positions = jnp.asarray(positions)
    if x.shape[-1] % 2:
        raise ValueError(f"rope: the width must be even but is {x.shape[-1]}")
    try:
        broadcast = jnp.broadcast_shapes(positions.shape, x.shape[:-1])
    except ValueError:
        broadcast = ()
    if broadcast != x.shape[:-1]:
        shapes = f"{tuple(positions.shape)} do not broadcast to {tuple(x.shape[:-1])}"
        raise ValueError(f"rope: positions of shape {shapes}")

    # The two components of each pair, along one axis.
    dtype = wide(x).dtype
    angles = rope_angles(positions, x.shape[-1], theta)
    # Angles are exact before they are rounded to the dtype of the result.
    cos = jnp.cos(angles).astype(dtype)
    sin = jnp.sin(angles).astype(dtype)
    num_pairs = x.shape[-1] // 2
    axis = -2
    split = (2, num_pairs)
    if layout == "interleaved":
        axis = -1
        split = (num_pairs, 2)
    pairs = wide(x).reshape(*x.shape[:-1], *split)
    a = jnp.take(pairs, 0, axis)
    b = jnp.take(pairs, 1, axis)
    turned = jnp.stack((a * cos - b * sin, a * sin + b * cos), axis)
    return turned.reshape(x.shape).astype(x.dtype)


def rope_angles(positions: jax.Array, dim: int, theta: float = 1e4) -> jax.Array:
    """`positions * theta^(-2 j / dim)` for j = 0 .. dim/2 - 1, up to whole turns: (...) -> (..., dim/2).

    Computed in float64 if JAX has it.  Otherwise in integers that count 2^-32 of a turn; their overflow removes whole
    turns.  The error is 1e-6 at position 1,000,000; a float32 product would be off by 0.006 at 100,000.
    """
    frequencies = theta ** (np.arange(0, dim, 2) / -dim)
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        return positions.astype(np.float64)[..., None] * frequencies

    # Whole turns per position make no difference, so the fraction of a turn is enough.
    units = frequencies / (2 * np.pi) % 1.0 * 2.0**32
    position = positions.astype(jnp.int32)[..., None]
    turn = position.astype(jnp.uint32) * np.floor(units).astype(np.uint32)
    fraction = jnp.round(position.astype(jnp.float32) * (units % 1).astype(np.float32)).astype(jnp.int32)
    turn = jax.lax.bitcast_convert_type(turn + fraction.astype(jnp.uint32), jnp.int32)
    return turn.astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
