"""Multi-head attention over any list of head groups, side by side, as a Flax NNX module.

    y = W_out [group_1(q, k, v) | group_2(q, k, v) | ...],    [q | k | v] = W_qkv x

Parameters have the names and shapes of `polyhead.MultiHeadAttention`; functions are those of `polyhead.jaxside`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from polyhead import config
from polyhead.config.mechanisms import check_shared
from polyhead.config.sizes import Sizes
from polyhead.jaxside.call import Array, AttentionCall
from polyhead.jaxside.latent_code import dense
from polyhead.jaxside.nnx.components import Identity, Initialiser, Linear, Norm, joined, parted
from polyhead.jaxside.nnx.heads import CODES, Group, Made, SymbolGroup, ValueHeads
from polyhead.jaxside.nnx.positions import AlibiBias, RelativePositionBias, bias_between, bias_of
from polyhead.jaxside.nnx.symbols import build_symbols, by_offset
from polyhead.jaxside.rope import rope
from polyhead.spec import PRESETS
from polyhead.spec.shapes import check_rate, check_window, named, one_of

WHO = "MultiHeadAttention"
Symbols = Array | Sequence[Array | None] | None
"""Symbols (b|1 s m), or a table (2 distance + 1, m) by offset: one array for all groups, or one (or None) a group."""


@named
class MultiHeadAttention(nnx.Module):
    """Self- or cross-attention with any mixture of heads.

    Arguments are those of `polyhead.MultiHeadAttention`; `rngs` (default: nnx.Rngs(0)) draws the parameters by the
    preset `init`.  There is no cache and no `cu_seqlens`.

    Raises ValueError for heads that do not match the width, and for options that exist in PyTorch only.
    """

    relative: RelativePositionBias | AlibiBias | None

    def __init__(
        self,
        dim: int,
        heads: config.Mechanism | Sequence[config.Mechanism],
        *,
        causal: bool = False,
        positions: config.Position | None = None,
        bias: bool = False,
        window: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        dropout_shared: bool = False,
        max_length: int = 512,
        own_symbols: bool = True,
        init: str = "cs336",
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        check_rate(WHO, dropout)
        one_of(WHO, "init", init, PRESETS)
        heads, draw = config.head_list(WHO, heads), Initialiser(rngs, init, dtype)
        self.dim, self.causal, self.max_length = dim, causal, max_length
        self.window = check_window(WHO, window)
        self.dropout, self.dropout_shared, self.heads = dropout, dropout_shared, heads
        self.total_heads = sum(group.heads for group in heads)
        self.sizes = tuple(mechanism.sizes(dim, self.total_heads) for mechanism in heads)
        check_shared(WHO, heads, self.sizes)
        self.widths = tuple(sum(size.widths[part] for size in self.sizes) for part in range(3))
        self.qkv = Linear(dim, sum(self.widths), draw, bias=bias, rows=self.widths)
        self.out = Linear(sum(size.heads * size.value_dim for size in self.sizes), dim, draw, bias=bias)
        self.groups = nnx.List(
            [_group(m, dim, size, draw, bias, max_length) for m, size in zip(heads, self.sizes, strict=True)]
        )
        self.rotary = positions if isinstance(positions, config.Rotary) else None
        self.relative = _relative(positions, self.total_heads, max_length, draw)
        norms = [
            Identity() if mechanism.share else Norm(size.dim, draw, eps=1e-6, bias=False)
            for mechanism, size in zip(heads, self.sizes, strict=True)
            for _ in range(2)
        ]
        self.qk_norms = nnx.List(norms if qk_norm else [])
        own = [group.symbols for group in heads if own_symbols and isinstance(group, config.SymbolHeads)]
        distinct = list(dict.fromkeys(own))
        source_of = (distinct.index(g.symbols) if isinstance(g, config.SymbolHeads) else None for g in heads)
        self.source_of = tuple(source_of) if own else ()
        self.symbols = nnx.List([build_symbols(source, dim, max_length, draw) for source in distinct])

    @named
    def __call__(
        self,
        x: Array,
        context: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        positions: Array | None = None,
        keep: Array | None = None,
        symbols: Symbols = None,
        rngs: nnx.Rngs | None = None,
        return_code: bool = False,
    ) -> Any:
        """y (b t m) from queries x (b t m) and keys and values from `context` (b s m), or from x if it is None; with
        `return_code` also the code of all pairs (b h t s), before dropout.

        `mask` is boolean, True where a query may attend to a key, and broadcasts to (b h t s).  `bias` is added to the
        scores: (b|1 h|1 t s), or by offset (h, t+s-1).  `positions` (b|1 t) are those of x, by default 0, 1, ... or,
        with a causal context, such that the last is that of its last key.
        `keep` (b|1 h|1 t s) multiplies the code; with `rngs` it is drawn at the layer's dropout rate.  `symbols` is one
        array for all groups or one (or None) per group: (b|1 s symbol width), or a table of 2 distance + 1 rows by
        clipped offset.  Raises ValueError for shapes that do not match.
        """
        source = x if context is None else context
        self._check(x, source, mask, bias, keep)
        positions = checked_positions(WHO, positions, *x.shape[:2])
        t, s = x.shape[1], source.shape[1]
        rows = self._project(x, source)
        if keep is None and rngs is not None and self.dropout > 0.0:
            shape = (1, 1, t, s) if self.dropout_shared else (x.shape[0], self.total_heads, t, s)
            keep = jax.random.bernoulli(rngs.dropout(), 1.0 - self.dropout, shape) / (1.0 - self.dropout)
            keep = keep.astype(jnp.promote_types(x.dtype, jnp.float32))
        keys = positions if context is None else None
        where = self._where(positions, keys, t, s, context is not None)
        bias = self._bias(bias, t, s, positions, keys, x.dtype)
        mask, window = self._limits(mask, t, s, positions, keys, self_attention=context is None)
        given = self._symbols(symbols, source, keys)
        outputs, codes = [], []
        made: AttentionCall | None = None
        last = list(accumulate(size.heads for size in self.sizes))
        for i, (group, a, b) in enumerate(zip(self.groups, (0, *last), last, strict=False)):
            made = self._inputs(i, group, rows[i], x, source, symbols=given[i], before=made, where=where)
            own = replace(made, bias=_of(bias, a, b), mask=_of(mask, a, b), keep=_of(keep, a, b), window=window)
            outputs.append(joined(group(own)))
            if return_code:
                codes.append(group.code(own))
        y = self.out(jnp.concatenate(outputs, -1))
        return (y, jnp.concatenate(codes, 1)) if return_code else y

    def _where(
        self, positions: Array | None, keys: Array | None, t: int, s: int, crossed: bool
    ) -> tuple[Array | None, Array | None]:
        """The positions of queries and keys; None for 0, 1, ..."""
        reach = max(t if positions is None else 0, s if keys is None else 0)  # of those that are counted
        if self.rotary is not None and reach > self.max_length:
            raise ValueError(f"{WHO}: {reach} positions but max_length is {self.max_length}")
        if positions is None and crossed and self.causal:  # the last query is the last key
            return max(0, s - t) + jnp.arange(t)[None], max(0, t - s) + jnp.arange(s)[None]
        return positions, keys

    def _check(self, x: Array, source: Array, mask: Array | None, bias: Array | None, keep: Array | None) -> None:
        for name, array in (("x (b t m)", x), ("context (b s m)", source)):
            if array.ndim != 3 or array.shape[-1] != self.dim:
                raise ValueError(f"{WHO}: m = {self.dim} but {name} = {tuple(array.shape)}")
        wanted = (x.shape[0], self.total_heads, x.shape[1], source.shape[1])
        if mask is not None and (mask.dtype != bool or not _broadcasts(mask.shape, wanted)):
            came = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"{WHO}: mask must be boolean and broadcast to (b h t s) = {wanted} but is {came}")
        offsets = (wanted[1], wanted[2] + wanted[3] - 1)
        if bias is not None and bias.shape != offsets and not (bias.ndim == 4 and _broadcasts(bias.shape, wanted)):
            shape = tuple(bias.shape)
            raise ValueError(f"{WHO}: bias must be (b h t s) = {wanted} or (h t+s-1) = {offsets} but is {shape}")
        if keep is not None and (keep.ndim != 4 or keep.shape[2:] != wanted[2:] or not _broadcasts(keep.shape, wanted)):
            raise ValueError(f"{WHO}: keep must be (b|1 h|1 t s), here {wanted}, but is {tuple(keep.shape)}")

    def _project(self, x: Array, source: Array) -> list[Made]:
        """Each group's part of the joint projection."""
        ends = list(accumulate(self.widths))
        if x is source:
            parts = jnp.split(self.qkv(x), ends[:2], -1)
        else:
            seen = jnp.split(self.qkv(source, ends[0]), [self.widths[1]], -1)
            parts = [jnp.asarray(self.qkv(x, 0, ends[0])), *seen]
        rows: list[Made] = [{} for _ in self.sizes]
        for part, (name, joint) in enumerate(zip("qkv", parts, strict=True)):
            cuts = list(accumulate(size.widths[part] for size in self.sizes))[:-1]
            for own, size, piece in zip(rows, self.sizes, jnp.split(joint, cuts, -1), strict=True):
                if name in size.takes:
                    own[name] = parted(piece, size.heads if name == "q" else size.kv_heads)
        return rows

    def _symbols(self, symbols: Symbols, source: Array, positions: Array | None) -> Sequence[Array | None]:
        widths = [group.symbol_dim for group in self.groups]
        if symbols is None and self.source_of:
            made = [module(source, positions) for module in self.symbols]
            return [None if which is None else made[which] for which in self.source_of]
        given: list[Array | None]
        given = [symbols] * len(widths) if symbols is None or isinstance(symbols, Array) else list(symbols)
        if len(given) != len(widths):
            raise ValueError(f"{WHO}: symbols must be one array (or None) a group: {len(widths)}, not {len(given)}")
        for i, (width, array) in enumerate(zip(widths, given, strict=True)):
            if width is None:
                continue
            if array is None:
                raise ValueError(f"{WHO}: group {i} takes symbols, of width {width}, but there are none for it")
            _check_symbols(array, source, width)
        return given

    def _inputs(
        self,
        i: int,
        group: Group,
        rows: Made,
        x: Array,
        source: Array,
        *,
        symbols: Array | None,
        before: AttentionCall | None,
        where: tuple[Array | None, Array | None],
    ) -> AttentionCall:
        """The call of group `i`, without its limits other than causality.  `before`: that of the previous group."""
        made, (t, s) = dict(rows), (x.shape[1], source.shape[1])
        if isinstance(group, SymbolGroup):
            assert symbols is not None
            made |= group.receive(group.features(x)) | group.send(group.features(source))
            values = group.values(symbols)
            if symbols.ndim == 2:
                made["v"] = by_offset(values, t, s, s - t if self.causal else 0)
            else:
                made["v"] = jnp.broadcast_to(values, (x.shape[0], *values.shape[1:]))
        if self.heads[i].share:
            assert before is not None
            q, k = before.q, before.k
        else:
            q, k = (self._place(2 * i + n, made[name], where[n]) for n, name in enumerate("qk"))
        return AttentionCall(q, k, made["v"], q_rel=made.get("q_rel"), k_rel=made.get("k_rel"), causal=self.causal)

    def _place(self, which: int, rows: Array, positions: Array | None) -> Array:
        """Normalise and rotate the queries (`which` even) or keys (odd) of group `which` // 2."""
        rows = self.qk_norms[which](rows) if len(self.qk_norms) else rows
        if self.rotary is None:
            return rows
        positions = jnp.arange(rows.shape[1])[None] if positions is None else positions
        return rope(rows, positions[..., None], theta=float(self.rotary.theta), layout=self.rotary.layout)

    def _bias(
        self, bias: Array | None, t: int, s: int, queries: Array | None, keys: Array | None, dtype: DTypeLike
    ) -> Array | None:
        """The sum of the given bias and the position bias; by offset unless one of them is dense."""
        if self.relative is None:
            return bias
        if queries is None:
            own = bias_of(self.relative, t, s, s - t if self.causal else 0)
        else:
            own = bias_between(self.relative, queries, jnp.arange(s)[None] if keys is None else keys)
        own = own.astype(jnp.promote_types(dtype, jnp.float32))  # bfloat16 cannot hold a distance of 257
        if bias is None:
            return own
        return own + bias if own.ndim == bias.ndim else dense(jnp.asarray(own), t, s) + dense(jnp.asarray(bias), t, s)

    def _limits(
        self,
        mask: Array | None,
        t: int,
        s: int,
        queries: Array | None,
        keys: Array | None,
        *,
        self_attention: bool,
    ) -> tuple[Array | None, int | None]:
        """The mask and the window of the op.  With given positions the window becomes a part of the mask."""
        if self.window is None or (queries is None and (self.causal or self_attention or t == s)):
            return mask, self.window
        queries = jnp.arange(t)[None] if queries is None else queries
        keys = jnp.arange(s)[None] if keys is None else keys
        near = jnp.abs(queries[:, None, :, None] - keys[:, None, None, :]) < self.window
        return near if mask is None else mask & near, None


def _group(
    mechanism: config.Mechanism, dim: int, sizes: Sizes, draw: Initialiser, bias: bool, max_length: int
) -> Group:
    if not isinstance(mechanism, tuple(CODES)) or hasattr(mechanism, "code"):  # a user's may inherit from one of ours
        raise ValueError(f"polyhead.jaxside: heads={type(mechanism).__name__}() exists in PyTorch only")
    if not isinstance(mechanism, config.SymbolHeads):
        return ValueHeads(mechanism, sizes, draw)
    std = mechanism.symbols.start_std(dim, max_length)
    return SymbolGroup(mechanism, dim, sizes, draw, bias=bias, symbol_std=std)


def _relative(
    positions: config.Position | None, heads: int, max_length: int, draw: Initialiser
) -> RelativePositionBias | AlibiBias | None:
    if positions is None or isinstance(positions, config.Rotary):
        return None
    if isinstance(positions, config.RelativeBias):
        return RelativePositionBias(heads, positions, max_length, draw)
    if isinstance(positions, config.Alibi):
        return AlibiBias(heads)
    raise ValueError(f"{WHO}: positions must be Rotary(), RelativeBias() or Alibi() but is {positions!r}")


def _check_symbols(symbols: Array, source: Array, width: int) -> None:
    """Raise ValueError unless symbols are those of the senders `source`, (b|1 s width), or a table by offset."""
    (b, s), shape = source.shape[:2], tuple(symbols.shape)
    if symbols.ndim == 2 and shape[1] == width:
        if shape[0] % 2 == 0:
            rows = f"2 distance + 1 rows, an odd number, not {shape[0]}"
            raise ValueError(f"{WHO}: a table of relative symbols has {rows}")
    elif shape not in ((b, s, width), (1, s, width)):
        raise ValueError(
            f"{WHO}: symbols must be (b|1 s m) = ({b}, {s}, {width}) or, if relative, a table (2 distance + 1, m) "
            f"but are {shape}"
        )


def checked_positions(who: str, positions: Array | None, b: int, t: int) -> Array | None:
    """Positions as int32, because differences of unsigned or of short ones overflow.  Raises ValueError unless they are
    integers (b|1 t)."""
    if positions is None:
        return None
    if jnp.issubdtype(positions.dtype, jnp.integer) and positions.shape in ((1, t), (b, t)):
        return positions.astype(jnp.int32)
    came = f"{positions.dtype} {tuple(positions.shape)}"
    raise ValueError(f"{who}: positions must be integers (b|1 t) = ({b}, {t}) but are {came}")


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def _of(array: Array | None, first: int, last: int) -> Array | None:
    """Heads `first` to `last` of a bias (b h t s) or (h t+s-1), a mask of 1 to 4 dimensions or a dropout mask."""
    if array is None or array.ndim == 1:
        return array
    if array.ndim == 2:
        return array if array.dtype == bool else array[first:last]
    return array if array.shape[-3] == 1 else array[..., first:last, :, :]
