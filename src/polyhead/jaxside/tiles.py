"""Any op in tiles of queries: memory O(t) instead of O(t^2); the backward pass computes each tile again.

Queries are independent of one another, so a tile is a small call of the reference with some queries and all keys.
`jax.lax.map` computes one tile after the other, and `jax.checkpoint` stores only the first query of a tile for the
backward pass.  Gradients are summed over tiles in at least float32.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyhead.jaxside.call import AttentionCall, Masks
from polyhead.jaxside.latent_code import visible, wide

Reference = Callable[[AttentionCall], jax.Array]

TILE = 128
"""The most queries of a tile."""

MAX_NUMBERS = 1 << 21
"""The most numbers in the largest intermediate of a tile of more than MIN_QUERIES queries."""

MIN_QUERIES = 8
"""A tile reads all keys and adds to all their gradients, so fewer queries would wait for memory."""


def is_large(call: AttentionCall) -> bool:
    """Is the call so large that tiles were measured to be no slower than the reference on a CPU?"""
    sizes = (call.q.shape[0], *call.lengths)
    # An exported function may have sizes that are not numbers yet.
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= 1 << 18


def run_in_tiles(reference: Reference, call: AttentionCall) -> jax.Array:
    """The output of a call, from the op's reference on tiles; compiled once per shape, even without jit."""
    return _run(reference, tile_size(call), call)


def tile_size(call: AttentionCall) -> int:
    """The number of queries of a tile, for tiles of nearly equal size."""
    batch, num_queries, num_heads, _ = call.q.shape
    num_keys, width = call.k.shape[1], call.v.shape[-1]

    # Numbers per pair in the largest intermediate.
    numbers = max(num_heads, width)
    if call.q_rel is not None:
        numbers = max(numbers, call.q_rel.shape[2])
    if call.pool or call.value_weight is not None:
        numbers = max(numbers, num_heads * width)

    numbers_of_query = max(1, batch * num_keys * numbers)
    queries = min(TILE, max(MIN_QUERIES, MAX_NUMBERS // numbers_of_query))
    return math.ceil(num_queries / math.ceil(num_queries / queries))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(reference: Reference, size: int, call: AttentionCall) -> jax.Array:
    num_queries = call.lengths[0]
    # The last tile ends with the last query, so it may begin with some queries of the tile before.
    starts = np.minimum(np.arange(0, num_queries, size), num_queries - size)

    # Gradients are summed over tiles in the dtype of what is cut, so half precision is cut from float32.
    sources = jax.tree.map(lambda x: wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, call)

    # Without the checkpoint the scores of every tile would be stored.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tile(sources: AttentionCall, start: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda source, array: source.astype(array.dtype), sources, call)
        return reference(queries_of(cast, start, size))

    # The gradient of a slice begins with zeros, which JAX shards by the mesh in its context.
    with jax.sharding.use_abstract_mesh(jax.typeof(call.q).sharding.mesh):
        tiles = jax.lax.map(functools.partial(tile, sources), jnp.asarray(starts))
    # (tile b query h e): the whole tiles, then the queries that are in the last tile alone.
    earlier = jnp.moveaxis(tiles[:-1], 0, 1)
    earlier = earlier.reshape(earlier.shape[0], (len(starts) - 1) * size, *earlier.shape[3:])
    return jnp.concatenate((earlier, tiles[-1][:, len(starts) * size - num_queries :]), 1)


def queries_of(call: AttentionCall, start: jax.Array, size: int) -> AttentionCall:
    """The call of `size` queries from `start` on, with one mask in place of all limits."""
    num_queries, num_keys = call.lengths
    cut = jax.lax.dynamic_slice_in_dim
    # Row j - i + t - 1 is that of query i and key j; a tile reads those of its last query and the first key on.
    offset, num_offsets = num_queries - size - start, size + num_keys - 1
    parts: dict[str, Any] = {"q": cut(call.q, start, size, 1)}
    if call.q_rel is not None:
        parts["q_rel"] = cut(call.q_rel, start, size, 1)
    if call.keep is not None:
        parts["keep"] = cut(call.keep, start, size, 2)
    if call.bias is not None and call.bias.ndim == 2:
        parts["bias"] = cut(call.bias, offset, num_offsets, 1)
    elif call.bias is not None:
        parts["bias"] = cut(call.bias, start, size, 2)
    if call.v.ndim == 3:
        parts["v"] = cut(call.v, offset, num_offsets, 0)
    mask = visible(call, start + jnp.arange(size, dtype=jnp.int32))
    return replace(call, **parts, masks=Masks(mask))
