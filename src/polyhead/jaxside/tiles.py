"""Any op in tiles: memory O(t) instead of O(t^2); the backward pass recomputes each tile.

The output of a mechanism is a sum over keys, so a tile of queries i and keys j is a small call of the reference:

    out_i       = sum over tiles of reference(q_i, k_j, v_j, bias_ij, ...)
    gradients   = sum over tiles of those of the reference, given dout_i                     (a custom VJP)

Where keys are pooled in another way, a tile has all of them.  A softmax over keys needs the whole row.  Its largest
score and the logarithm of its sum are computed first, by another sum over tiles:

    top_i       = max_j s_ij, without a gradient: it cancels
    total_i     = log sum_j exp(s_ij - top_i),   a_ij = exp(s_ij - top_i - total_i)
    dtotal_i    = from the tiles above,          ds_ij += a_ij dtotal_i

In one number, top + total, the logarithm would be lost in the rounding of a top such as -1e9.

Each is one `lax.scan` over the tiles that causality and window do not mask completely.  Sums are in at least
float32.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6; Dao et al. 2022, "FlashAttention" (recomputing).
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
from polyhead.jaxside.dispatch import Impl
from polyhead.jaxside.latent_code import sequence_of, softmax_visible, wide

Arrays = dict[str, jax.Array]
Run = Callable[[AttentionCall], jax.Array]
Rows = Callable[[AttentionCall], dict[str, Logits]]
"""The softmaxes over keys in a call: field of AttentionCall for `top` and `total` -> function of the scores."""

TILE = 128
"""The most queries, and the most keys, of a tile."""

SMALL, NUMBERS = 16, 1 << 22
"""A tile with more than SMALL queries or keys has at most NUMBERS numbers in its largest intermediate."""

AXES = {
    "q": "b t h d",
    "k": "b s g d",
    "v": "b s g e",
    "q_rel": "b t r p",
    "k_rel": "b s r p",
    "relation_weight": "h e r",
    "value_weight": "h f e",
    "bias": "b h t s",
    "keep": "b h t s",
    "mask": "b h t s",
    "total": "b h t x",
    "total_rel": "b r t x",
    "number_t": "t",
    "number_s": "s",
    "scale": "",
}
"""Axes of the arguments; t and s are cut into tiles.  Arrays by offset have an axis n instead, see BY_OFFSET."""

BY_OFFSET = {("bias", 2): "h n", ("v", 3): "n g e"}
FIXED = ("mask", "number_t", "number_s")
"""Arrays without a gradient."""


@dataclass(frozen=True)
class Grid:
    """How a call is cut into tiles, and its options."""

    t: int
    s: int
    queries: int
    keys: int
    options: AttentionCall  # without arrays

    @property
    def padded(self) -> tuple[int, int]:
        """(t, s), padded to whole tiles."""
        return -(-self.t // self.queries) * self.queries, -(-self.s // self.keys) * self.keys

    def places(self) -> np.ndarray:
        """(tiles, 2): the first query and key of every tile that causality and window do not mask completely."""
        starts = np.arange(0, self.t, self.queries), np.arange(0, self.s, self.keys)
        first, key = np.meshgrid(*starts, indexing="ij")
        place, end = first + self.s - self.t, key + self.keys - 1
        last = np.minimum(first + self.queries, self.t) - 1 + self.s - self.t
        seen = np.ones_like(first, bool)
        if self.options.causal:
            seen &= key <= last
        if self.options.window is not None:
            seen &= (end > place - self.options.window) & (key < last + self.options.window)
        return np.stack([first[seen], key[seen]], 1).astype(np.int32)

    def fill(self, name: str, x: jax.Array) -> jax.Array:
        """`x`, padded with zeros after the last query and key."""
        after = {"t": (0, self.padded[0] - self.t), "s": (0, self.padded[1] - self.s)}
        after["n"] = (after["t"][1], after["s"][1])
        sides = [after.get(a, (0, 0)) if size > 1 else (0, 0) for a, size in zip(axes(name, x), x.shape, strict=True)]
        return jnp.pad(x, sides) if any(map(any, sides)) else x

    def _part(self, letters: str, x: jax.Array, at: jax.Array) -> tuple[list[Any], list[int]]:
        """Start and size of a tile's part of `x`; all tiles share axes of size 1."""
        offset = at[1] - at[0] + self.padded[0] - self.queries
        parts = {"t": (at[0], self.queries), "s": (at[1], self.keys), "n": (offset, self.queries + self.keys - 1)}
        all_of = {size: (np.int32(0), size) for size in x.shape}
        own = [parts.get(a, all_of[n]) if n > 1 else all_of[n] for a, n in zip(letters, x.shape, strict=True)]
        return [start for start, _ in own], [size for _, size in own]

    def cut(self, letters: str, x: jax.Array, at: jax.Array) -> jax.Array:
        """A tile's part of `x`."""
        return jax.lax.dynamic_slice(x, *self._part(letters, x, at)) if x.ndim else x

    def parts(self, arrays: Arrays, at: jax.Array) -> Arrays:
        """A tile's parts of `arrays`, by name."""
        return {name: self.cut(axes(name, x), x, at) for name, x in arrays.items()}

    def add(self, letters: str, total: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
        """`total` plus a tile's part."""
        if not total.ndim:
            return total + part
        start, size = self._part(letters, total, at)
        now = jax.lax.dynamic_slice(total, start, size) + part.astype(total.dtype)
        return jax.lax.dynamic_update_slice(total, now, start)

    def call(self, arrays: Arrays, fixed: Arrays, at: jax.Array) -> AttentionCall:
        """A tile with its arrays as a call; masks, causality, window and packed sequences become one mask."""
        fixed = self.parts(fixed, at)
        ahead = at[1] + jnp.arange(self.keys) - (at[0] + jnp.arange(self.queries) + self.s - self.t)[:, None]
        limits = [at[1] + jnp.arange(self.keys) < self.s] if self.padded[1] != self.s else []
        limits += [ahead <= 0] if self.options.causal else []
        limits += [] if self.options.window is None else [jnp.abs(ahead) < self.options.window]
        if "number_t" in fixed:
            limits.append(fixed.pop("number_t")[:, None] == fixed.pop("number_s"))
        limits += [fixed["mask"]] if "mask" in fixed else []
        look = functools.reduce(jnp.logical_and, limits) if limits else None
        given: dict[str, Any] = {**arrays, **fixed, "mask": look}
        return replace(self.options, **given, causal=False, window=None)


def axes(name: str, x: jax.Array) -> str:
    """One letter for every dimension."""
    return BY_OFFSET.get((name, x.ndim), AXES.get(name, "")).replace(" ", "")[-x.ndim :] if x.ndim else ""


# ---------------------------------------------------------------------------------------------------- sums over tiles
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum(run: Run, grid: Grid, out: str, arrays: Arrays, fixed: Arrays) -> jax.Array:
    """The sum over tiles of the results of `run`, whose axes are `out`."""

    def tile(at: jax.Array) -> jax.Array:
        return run(grid.call(grid.parts(arrays, at), fixed, at))

    like = jax.eval_shape(tile, jax.ShapeDtypeStruct((2,), np.int32))
    sizes = [grid.padded[0] if a == "t" else size for a, size in zip(out, like.shape, strict=True)]
    of_heads = jnp.zeros_like(arrays["q"], jnp.promote_types(like.dtype, jnp.float32)).sum((1, 3))
    nothing = jnp.broadcast_to(of_heads[:, None, :, None], sizes)  # sharded like the queries
    return jax.lax.scan(
        lambda total, at: (grid.add(out, total, tile(at), at), None), nothing, jnp.asarray(grid.places())
    )[0]


def _sum_forward(run: Run, grid: Grid, out: str, arrays: Arrays, fixed: Arrays) -> tuple[jax.Array, Any]:
    return _sum(run, grid, out, arrays, fixed), (arrays, fixed)


def _sum_backward(run: Run, grid: Grid, out: str, saved: tuple[Arrays, Arrays], dout: jax.Array) -> Any:
    arrays, fixed = saved

    def step(grads: Arrays, at: jax.Array) -> tuple[Arrays, None]:
        like, pull = jax.vjp(lambda mine: run(grid.call(mine, fixed, at)), grid.parts(arrays, at))
        (parts,) = pull(grid.cut(out, dout, at).astype(like.dtype))
        return {name: grid.add(axes(name, x), x, parts[name], at) for name, x in grads.items()}, None

    zeros = {name: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)) for name, x in arrays.items()}
    grads = jax.lax.scan(step, zeros, jnp.asarray(grid.places()))[0]
    return {name: x.astype(arrays[name].dtype) for name, x in grads.items()}, None


_sum.defvjp(_sum_forward, _sum_backward)


# --------------------------------------------------------------------------------------------- softmax over all keys
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(logits: Logits, grid: Grid, arrays: Arrays, fixed: Arrays) -> jax.Array:
    """(b h t 2): `top` and `total` of `logits` over the visible keys of each query; 0 without visible keys."""

    def tile(at: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        s, look = logits(grid.call(grid.parts(arrays, at), fixed, at))
        return wide(s), look

    like, _ = jax.eval_shape(tile, jax.ShapeDtypeStruct((2,), np.int32))
    lowest = jnp.finfo(like.dtype).min

    def step(sofar: tuple[jax.Array, jax.Array], at: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        s, look = tile(at)
        s = s if look is None else jnp.where(look, s, lowest)
        top, total = (grid.cut("bht", x, at) for x in sofar)
        higher = jnp.maximum(top, s.max(-1, initial=lowest))
        part = jnp.exp(s - higher[..., None]) if look is None else jnp.where(look, jnp.exp(s - higher[..., None]), 0)
        now = higher, total * jnp.exp(top - higher) + part.sum(-1)
        start, _ = grid._part("bht", sofar[0], at)
        return tuple(jax.lax.dynamic_update_slice(x, y, start) for x, y in zip(sofar, now, strict=True)), None  # type: ignore[return-value]

    size = (*like.shape[:2], grid.padded[0])
    of_heads = arrays["q"] if arrays["q"].shape[2] == size[1] else arrays["q_rel"]
    nothing = jnp.broadcast_to(jnp.zeros_like(of_heads, like.dtype).sum((1, 3))[:, :, None], size)
    top, total = jax.lax.scan(step, (nothing + lowest, nothing), jnp.asarray(grid.places()))[0]
    empty = total == 0
    return jnp.stack((jnp.where(empty, 0, top), jnp.log(jnp.where(empty, 1, total))), -1)


def _total_forward(logits: Logits, grid: Grid, arrays: Arrays, fixed: Arrays) -> tuple[jax.Array, Any]:
    total = _total(logits, grid, arrays, fixed)
    return total, (arrays, {**fixed, "total": total})


def _total_backward(logits: Logits, grid: Grid, saved: tuple[Arrays, Arrays], dtotal: jax.Array) -> Any:
    return _sum_backward(functools.partial(_shares, logits), grid, "bht", saved, dtotal[..., 1])


def _shares(logits: Logits, x: AttentionCall) -> jax.Array:
    """(b h t): the tile's part of the softmax's sum; its gradient by the scores is that of the total."""
    return softmax_visible(*logits(x), 3, x.total).sum(-1)


_total.defvjp(_total_forward, _total_backward)


# ---------------------------------------------------------------------------------------------------------- the impl
def blocked(reference: Run, rows: Rows) -> Impl:
    """The tiled impl of an op, from its reference and the softmaxes over keys in it.

    It takes every call that the reference takes.  It is static and hashable, so it is compiled once per shape even
    without jit.
    """

    def forward(x: AttentionCall) -> jax.Array:
        if 0 in x.lengths:  # of nothing there is no tile
            return reference(x)
        return _forward(reference, rows, (TILE, SMALL, NUMBERS), x)

    return Impl(forward, preferred=large)


def large(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of tiles (one core, float32, 8 heads).  HYLA, causal:
    0.8 at b = 8, t = 128, d = 16; 2.5 at b = 1, t = 512, d = 16 (full: 1.5; softmax: 3.9); 4.1 at t = 1024, d = 32.
    Softmax attention: 3.1 and 3.2 at the last two.  Not measured on a GPU.
    """
    t, s = x.lengths
    return x.q.shape[0] * t * s >= 1 << 18


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(reference: Run, rows: Rows, sizes: tuple[int, int, int], x: AttentionCall) -> jax.Array:
    t, s = x.lengths
    given = {f.name: getattr(x, f.name) for f in fields(x) if f.name in AXES and getattr(x, f.name) is not None}
    absent: dict[str, Any] = dict.fromkeys([*given, "cu_seqlens"])
    window = None if x.window is None else min(x.window, t + s)  # sums stay within int32
    options = replace(x, window=window, **absent)
    if x.cu_seqlens is not None:
        given |= dict.fromkeys(("number_t", "number_s"), sequence_of(x.cu_seqlens, t))
    grid = Grid(t, s, *tile_sizes(x, *sizes), options)
    given = {name: grid.fill(name, array) for name, array in given.items()}
    fixed = {name: given.pop(name) for name in FIXED if name in given}
    totals = {name: _total(logits, grid, given, fixed) for name, logits in rows(x).items()}
    return _sum(reference, grid, "bthe", {**given, **totals}, fixed)[:, :t].astype(x.q.dtype)


def tile_sizes(x: AttentionCall, most: int, small: int, numbers: int) -> tuple[int, int]:
    """(queries, keys) of a tile: tiles of nearly equal size; the larger side is halved until the numbers fit.

    Pooled heads need all keys; then queries are halved.
    """
    (b, t, h, _), s, e = x.q.shape, x.k.shape[1], x.v.shape[-1]
    relations = 0 if x.q_rel is None else x.q_rel.shape[2]
    width = max(h, e, relations, h * e if x.pool or x.value_weight is not None else 0)
    queries, keys = most, s if x.pool else most
    while x.pool and b * queries * keys * width > numbers and queries > 1:
        queries //= 2
    while not x.pool and b * queries * keys * width > numbers and max(queries, keys) > small:
        queries, keys = (queries, keys // 2) if keys >= queries else (queries // 2, keys)
    return _even(t, queries), _even(s, keys)


def _even(n: int, most: int) -> int:
    """The size of parts of `n`: as few as possible, of at most `most`, and nearly equal."""
    return math.ceil(n / math.ceil(n / most))
