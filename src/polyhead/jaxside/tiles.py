"""Any op in tiles: memory O(t) instead of O(t^2); the backward pass computes each tile again.

The output of a mechanism is a sum over keys, so a tile of queries i and keys j is a small call of the reference:

    out_i   = sum over tiles of reference(q_i, k_j, v_j, bias_ij, ...)

Where keys are pooled in another way, a tile has all keys.  A softmax over keys needs the whole row.  Its largest score
and the logarithm of its sum come first, from two more passes over the tiles:

    top_i   = max_j s_ij, a constant in gradients because it cancels
    total_i = log sum_j exp(s_ij - top_i),      a_ij = exp(s_ij - top_i - total_i)

In one number, top + total, the logarithm would be lost in the rounding of a top such as -1e9.

Each pass is one `lax.scan` over the tiles that causality and window do not mask completely.  `jax.checkpoint` stores
only the corner of a tile for the backward pass.  Sums are in at least float32.  Schug et al. 2024, "Attention as a
hypernetwork", eq. 6; Dao et al. 2022, "FlashAttention" (recomputing).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyhead.jaxside.call import AttentionCall, Logits
from polyhead.jaxside.latent_code import sequence_of, wide

Arrays = dict[str, jax.Array]
Reference = Callable[[AttentionCall], jax.Array]
RowSoftmaxes = Callable[[AttentionCall], dict[str, Logits]]
"""The softmaxes over keys in a call: the field of AttentionCall for `top` and `total` -> function of the scores."""

TILE = 128
"""The most queries, and the most keys, of a tile."""

SMALL = 16
MAX_NUMBERS = 1 << 22
"""A tile with more than SMALL queries or keys has at most MAX_NUMBERS numbers in its largest intermediate."""

AXES = {
    "q": "bthd",
    "k": "bsgd",
    "v": "bsge",
    "q_rel": "btrp",
    "k_rel": "bsrp",
    "relation_weight": "her",
    "value_weight": "hfe",
    "bias": "bhts",
    "keep": "bhts",
    "mask": "bhts",
    "total": "bhtx",
    "total_rel": "brtx",
    "query_sequence": "t",
    "key_sequence": "s",
    "scale": "",
}
"""Axes of the arguments; t and s are cut into tiles."""

AXES_BY_OFFSET = {("bias", 2): "hn", ("v", 3): "nge"}
"""Axes of arguments by offset, by name and number of dimensions; the offsets n = t + s - 1 are cut, too."""


@dataclass(frozen=True)
class Grid:
    """Sizes of a call and of its tiles, and the options of the call."""

    num_queries: int
    num_keys: int
    tile_queries: int
    tile_keys: int
    options: AttentionCall  # without arrays

    @property
    def padded_queries(self) -> int:
        """The number of queries in whole tiles."""
        return math.ceil(self.num_queries / self.tile_queries) * self.tile_queries

    @property
    def padded_keys(self) -> int:
        """The number of keys in whole tiles."""
        return math.ceil(self.num_keys / self.tile_keys) * self.tile_keys

    def corners(self) -> np.ndarray:
        """(tiles, 2): the first query and key of every tile that causality and window do not mask completely."""
        # NumPy, not JAX: the list of tiles is known while JAX traces, so masked tiles cost nothing.
        query_starts = np.arange(0, self.num_queries, self.tile_queries)
        key_starts = np.arange(0, self.num_keys, self.tile_keys)
        first_query, first_key = np.meshgrid(query_starts, key_starts, indexing="ij")
        last_query = np.minimum(first_query + self.tile_queries, self.num_queries) - 1
        last_key = first_key + self.tile_keys - 1

        # The last query is aligned with the last key.
        shift = self.num_keys - self.num_queries
        visible = np.ones_like(first_query, bool)
        if self.options.causal:
            visible &= first_key <= last_query + shift
        if self.options.window is not None:
            visible &= last_key > first_query + shift - self.options.window
            visible &= first_key < last_query + shift + self.options.window
        return np.stack([first_query[visible], first_key[visible]], 1).astype(np.int32)

    def pad(self, name: str, array: jax.Array) -> jax.Array:
        """`array`, padded with zeros to whole tiles."""
        added_queries = self.padded_queries - self.num_queries
        added_keys = self.padded_keys - self.num_keys
        # Offset 0 is that of the last query, so queries are added before it.
        added = {"t": (0, added_queries), "s": (0, added_keys), "n": (added_queries, added_keys)}
        widths = []
        for letter, size in zip(axes(name, array), array.shape, strict=True):
            widths.append(added.get(letter, (0, 0)) if size > 1 else (0, 0))
        if not widths:  # a scalar, such as a learned scale
            return array
        return jnp.pad(array, widths)

    def cut(self, name: str, array: jax.Array, corner: jax.Array) -> jax.Array:
        """A tile's part of `array`.  All tiles share axes of size 1."""
        # Column j - i + t - 1 holds the offset of query i and key j; a tile reads a range of columns.
        first_offset = corner[1] - corner[0] + self.padded_queries - self.tile_queries
        parts = {
            "t": (corner[0], self.tile_queries),
            "s": (corner[1], self.tile_keys),
            "n": (first_offset, self.tile_queries + self.tile_keys - 1),
        }
        for axis, letter in enumerate(axes(name, array)):
            if letter in parts and array.shape[axis] > 1:
                start, size = parts[letter]
                array = jax.lax.dynamic_slice_in_dim(array, start, size, axis)
        return array

    def mask(self, arrays: Arrays, corner: jax.Array) -> jax.Array | None:
        """Where the queries of a tile may attend to its keys, by masks, causality, window and packed sequences."""
        query = corner[0] + jnp.arange(self.tile_queries)[:, None]
        key = corner[1] + jnp.arange(self.tile_keys)
        ahead = key - (query + self.num_keys - self.num_queries)
        limits = []
        if self.padded_keys != self.num_keys:
            limits.append(key < self.num_keys)
        if self.options.causal:
            limits.append(ahead <= 0)
        if self.options.window is not None:
            limits.append(jnp.abs(ahead) < self.options.window)
        if "query_sequence" in arrays:
            limits.append(arrays["query_sequence"][:, None] == arrays["key_sequence"])
        if "mask" in arrays:
            limits.append(arrays["mask"])
        if not limits:
            return None
        return functools.reduce(jnp.logical_and, limits)

    def call(self, arrays: Arrays, dtypes: dict[str, Any], corner: jax.Array) -> AttentionCall:
        """A tile as a call, which has one mask in corner of all limits, and arrays of these dtypes."""
        parts: dict[str, Any] = {
            name: self.cut(name, array, corner).astype(dtypes[name]) for name, array in arrays.items()
        }
        mask = self.mask(parts, corner)
        for name in ("mask", "query_sequence", "key_sequence"):
            parts.pop(name, None)
        return replace(self.options, **parts, mask=mask, causal=False, window=None)


def axes(name: str, array: jax.Array) -> str:
    """One letter for every dimension; a mask or bias may lack the first ones."""
    letters = AXES_BY_OFFSET.get((name, array.ndim), AXES[name])
    return letters[len(letters) - array.ndim :]


# ----------------------------------------------------------------------------------------------- passes over the tiles
def scan_tiles(
    grid: Grid,
    arrays: Arrays,
    tile: Reference,
    letters: str,
    *,
    combine: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add,
    start: float = 0.0,
) -> jax.Array:
    """The results of `tile`, whose axes are `letters`, combined over all tiles in at least float32."""
    # Gradients are summed over tiles in the dtype of what is cut, so half precision is cut from float32.
    dtypes = {name: array.dtype for name, array in arrays.items()}
    sources = {}
    for name, array in arrays.items():
        sources[name] = wide(array) if jnp.issubdtype(array.dtype, jnp.floating) else array

    # Without the checkpoint the scores of every tile would be stored.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def compute(sources: Arrays, corner: jax.Array) -> jax.Array:
        return wide(tile(grid.call(sources, dtypes, corner)))

    axis = letters.index("t")

    # A step adds a tile of results to the rows of its queries.
    def step(total: jax.Array, corner: jax.Array) -> tuple[jax.Array, None]:
        rows = jax.lax.dynamic_slice_in_dim(total, corner[0], grid.tile_queries, axis)
        rows = combine(rows, compute(sources, corner))
        return jax.lax.dynamic_update_slice_in_dim(total, rows, corner[0], axis), None

    # What is computed from the queries has their sharding, which new zeros would not have.
    result = jax.eval_shape(compute, sources, jax.ShapeDtypeStruct((2,), np.int32))
    shape = list(result.shape)
    shape[axis] = grid.padded_queries
    has_relations = sources["q"].shape[2] != shape[letters.index("h")]
    queries = sources["q_rel"] if has_relations else sources["q"]
    zeros = (jnp.isnan(queries) & False).any((1, 3)).astype(result.dtype)
    zeros = jnp.expand_dims(zeros, [i for i, letter in enumerate(letters) if letter not in "bh"])
    return jax.lax.scan(step, jnp.broadcast_to(zeros, shape) + start, jnp.asarray(grid.corners()))[0]


def row_total(logits: Logits, grid: Grid, arrays: Arrays) -> jax.Array:
    """(b h t 2): `top` and `total` of `logits` over the visible keys of each query; 0 without visible keys."""

    def largest(call: AttentionCall) -> jax.Array:
        scores, mask = logits(call)
        lowest = jnp.finfo(scores.dtype).min
        if mask is not None:
            scores = jnp.where(mask, scores, lowest)
        return scores.max(-1, initial=lowest)

    def sum_of_exponentials(call: AttentionCall) -> jax.Array:
        scores, mask = logits(call)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jnp.exp(scores - call.total).sum(-1)

    # The largest score cancels in the softmax, so no gradient goes through it.
    constants = jax.lax.stop_gradient(arrays)
    lowest = float(jnp.finfo(wide(arrays["q"]).dtype).min)
    top = scan_tiles(grid, constants, largest, "bht", combine=jnp.maximum, start=lowest)
    total = scan_tiles(grid, {**arrays, "total": top[..., None]}, sum_of_exponentials, "bht")
    # A query without a visible key: exp(score - 0 - 0) is then masked to 0 and not NaN.
    is_empty = total == 0
    top = jnp.where(is_empty, 0, top)
    return jnp.stack((top, jnp.log(jnp.where(is_empty, 1, total))), -1)


# ------------------------------------------------------------------------------------------------------ a call in tiles
def is_large(call: AttentionCall) -> bool:
    """Is the call so large that tiles were measured to be no slower than the reference on a CPU?"""
    num_queries, num_keys = call.lengths
    return call.q.shape[0] * num_queries * num_keys >= 1 << 18


def run_in_tiles(reference: Reference, row_softmaxes: RowSoftmaxes, call: AttentionCall) -> jax.Array:
    """Return the output of a call, from the op's reference on tiles and the softmaxes over keys in it.

    It is compiled once per shape even without jit.
    """
    return _run(reference, row_softmaxes, (TILE, SMALL, MAX_NUMBERS), call)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    reference: Reference, row_softmaxes: RowSoftmaxes, limits: tuple[int, int, int], call: AttentionCall
) -> jax.Array:
    num_queries, num_keys = call.lengths
    # Absent arguments are left out, so that every entry is cut.
    arrays: Arrays = {}
    for field in fields(call):
        array = getattr(call, field.name)
        if field.name in AXES and array is not None:
            arrays[field.name] = array

    # The options of the call remain: its arrays are cut into tiles.
    absent: dict[str, Any] = dict.fromkeys([*arrays, "cu_seqlens"])
    options = replace(call, **absent)
    if call.window is not None:
        options = replace(options, window=min(call.window, num_queries + num_keys))  # sums stay within int32
    if call.cu_seqlens is not None:
        sequences = sequence_of(call.cu_seqlens, num_queries)
        arrays.update(query_sequence=sequences, key_sequence=sequences)

    # The gradient of a slice begins with zeros, which JAX shards by the mesh in its context.
    grid = Grid(num_queries, num_keys, *tile_sizes(call, *limits), options)
    with jax.sharding.use_abstract_mesh(jax.typeof(call.q).sharding.mesh):
        arrays = {name: grid.pad(name, array) for name, array in arrays.items()}
        totals = {name: row_total(logits, grid, arrays) for name, logits in row_softmaxes(call).items()}
        out = scan_tiles(grid, {**arrays, **totals}, reference, "bthe")
    return out[:, :num_queries].astype(call.q.dtype)


def tile_sizes(call: AttentionCall, largest: int, small: int, max_numbers: int) -> tuple[int, int]:
    """(queries, keys) of a tile: tiles of nearly equal size; the larger side is halved until the numbers fit.

    Pooled heads need all keys; then queries are halved.
    """
    batch, num_queries, num_heads, _ = call.q.shape
    num_keys = call.k.shape[1]
    width = call.v.shape[-1]

    # Numbers per pair in the largest intermediate.
    numbers = max(num_heads, width)
    if call.q_rel is not None:
        numbers = max(numbers, call.q_rel.shape[2])
    if call.pool or call.value_weight is not None:
        numbers = max(numbers, num_heads * width)

    queries = largest
    keys = num_keys if call.pool else largest
    while batch * queries * keys * numbers > max_numbers:
        if call.pool:
            if queries == 1:
                break
            queries //= 2
        elif max(queries, keys) <= small:
            break
        elif keys >= queries:
            keys //= 2
        else:
            queries //= 2
    return _even_size(num_queries, queries), _even_size(num_keys, keys)


def _even_size(number: int, largest: int) -> int:
    """The size of the fewest parts of `number` of at most `largest` that are nearly equal."""
    return math.ceil(number / math.ceil(number / largest))
