"""Position encodings of the NNX modules: T5 relative bias, ALiBi, vectors that are added to the inputs.

A bias is by offset, (h t+s-1), with column j - i + t - 1 for query i and key j; between given positions it is dense.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from polyhead import config
from polyhead.jaxside.call import Array
from polyhead.jaxside.nnx.components import Initialiser, rows_of
from polyhead.spec.numbers import alibi_slopes, bucket_table, check_buckets


class RelativePositionBias(nnx.Module):
    """T5's learned bias on the scores: one number per head and bucket of distances; `table` is (heads, buckets)."""

    def __init__(self, heads: int, settings: config.RelativeBias, max_length: int, draw: Initialiser) -> None:
        buckets = settings.buckets or max_length
        self.kind = (buckets, settings.max_distance or buckets, settings.bidirectional)
        check_buckets(*self.kind)
        self.table = draw.normal(heads, buckets, std=buckets**-0.5)

    def __call__(self, distance: Array) -> Array:
        """The bias (h ...) for each `distance` (...) = query position - key position."""
        reach = max(self.kind[:2])
        bucket = jnp.asarray(bucket_table(*self.kind), dtype=jnp.int32)[jnp.clip(distance, -reach, reach) + reach]
        return self.table[...][:, bucket]


class AlibiBias(nnx.Module):
    """`-slope_h |i - j|` on the scores: no parameters."""

    def __init__(self, heads: int) -> None:
        self.slopes = tuple(alibi_slopes(heads))

    def __call__(self, distance: Array) -> Array:
        """The bias (h ...) for each `distance` (...) = query position - key position."""
        return -jnp.array(self.slopes).reshape(-1, *(1,) * distance.ndim) * jnp.abs(distance)


class LearnedPositions(nnx.Module):
    """A learned vector per position; `table` is (max_length, dim)."""

    def __init__(self, max_length: int, dim: int, draw: Initialiser) -> None:
        self.table = draw.normal(max_length, dim, std=0.02)

    def __call__(self, positions: Array) -> Array:
        return rows_of(self.table[...], positions)


class SinusoidalPositions(nnx.Module):
    """`sin(w), cos(w)` in turn, w = position * 10000^(-2 j / dim)."""

    def __init__(self, max_length: int, dim: int) -> None:
        if dim % 2:
            raise ValueError(f"SinusoidalPositions: the width must be even but is {dim}")
        self.max_length, self.dim = max_length, dim

    def __call__(self, positions: Array) -> Array:
        angles = np.arange(self.max_length)[:, None] * 1e4 ** (np.arange(0, self.dim, 2) / -self.dim)
        table = np.stack((np.sin(angles), np.cos(angles)), -1).reshape(self.max_length, self.dim)
        return rows_of(table, positions)  # in float64 if JAX has it


def bias_of(relative: RelativePositionBias | AlibiBias, t: int, s: int, offset: int) -> Array:
    """The bias by offset; `offset` is the position of query 0 minus that of key 0."""
    return relative(offset + t - 1 - jnp.arange(t + s - 1))


def bias_between(relative: RelativePositionBias | AlibiBias, queries: Array, keys: Array) -> Array:
    """The bias (b|1 h t s) between positions (b|1 t) and (b|1 s)."""
    return jnp.moveaxis(relative(queries[..., :, None] - keys[..., None, :]), 0, -3)
