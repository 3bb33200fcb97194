"""Sources of symbols for relational heads, as NNX modules: see `polyhead.layers.symbols`.

    symbolic     s_i = sum_n softmax_n(query(x_i) . template_n / sqrt(d)) library_n             each head its own part
    position     s_i = table_i
    relative     s_ij = table_(j - i), clipped

A source is called with the residual stream (b s m).  It returns symbols by key (b|1 s dim), or a table by offset
(2 distance + 1, dim).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from polyhead import config
from polyhead.jaxside.call import Array, scaled
from polyhead.jaxside.nnx.components import Fixed, Initialiser, Linear, joined, parted, rows_of
from polyhead.spec.numbers import SYMBOL_HEADS


class SymbolicAttention(nnx.Module):
    """Each token retrieves from a library of learned symbols, by softmax attention over their templates."""

    library: nnx.Variable

    def __init__(self, source: config.SymbolicAttention, dim: int, draw: Initialiser) -> None:
        width = source.dim or dim
        self.heads = math.gcd(SYMBOL_HEADS, dim, width) if source.heads is None else source.heads
        if dim % self.heads or width % self.heads:
            raise ValueError(f"SymbolicAttention: heads must divide {dim} and {width} but is {self.heads}")
        self.query = Linear(dim, dim, draw)
        self.templates = draw.normal(source.count, dim)
        library = draw.normal(source.count, width)
        self.library = library if source.trainable else Fixed(library[...])

    def __call__(self, x: Array, positions: Array | None = None) -> Array:
        """Symbols (b s dim) of each token, which depend on no other token."""
        q, templates, library = (parted(a, self.heads) for a in (self.query(x), self.templates[...], self.library[...]))
        assigned = jax.nn.softmax(scaled(jnp.einsum("bshd,nhd->bshn", q, templates), q.shape[-1] ** -0.5), -1)
        return joined(jnp.einsum("bshn,nhe->bshe", assigned, library))


class PositionSymbols(nnx.Module):
    """A learned symbol for each position; `table` is (max_length, dim)."""

    def __init__(self, width: int, max_length: int, draw: Initialiser) -> None:
        self.max_length = max_length
        self.table = draw.normal(max_length, width)

    def __call__(self, x: Array, positions: Array | None = None) -> Array:
        """The symbols (1 s dim) of positions 0, 1, ..., shared by the batch, or those of `positions`."""
        if positions is not None:
            return rows_of(self.table[...], positions)
        if x.shape[1] > self.max_length:
            raise ValueError(f"PositionSymbols: {x.shape[1]} positions but max_length is {self.max_length}")
        return self.table[...][None, : x.shape[1]]


class RelativeSymbols(nnx.Module):
    """A learned symbol for each offset of key and query; `table` is (2 distance + 1, dim)."""

    def __init__(self, width: int, max_length: int, distance: int | None, draw: Initialiser) -> None:
        self.longest = max_length if distance is None else None
        self.distance = max_length - 1 if distance is None else distance
        rows = 2 * self.distance + 1
        self.table = draw.uniform(rows, width, bound=(6.0 / (rows + width)) ** 0.5)

    def __call__(self, x: Array, positions: Array | None = None) -> Array:
        """The table by offset; `x` only gives the length."""
        if self.longest is not None and x.shape[1] > self.longest:
            raise ValueError(
                f"RelativeSymbols: {x.shape[1]} positions but max_length is {self.longest}: give distance= to clip "
                "offsets"
            )
        return self.table[...]


SymbolModule = SymbolicAttention | PositionSymbols | RelativeSymbols


def build_symbols(source: config.Symbols, dim: int, max_length: int, draw: Initialiser) -> SymbolModule:
    """The module of a source of symbols.  Raises ValueError for one that exists in PyTorch only."""
    width = source.dim or dim
    if isinstance(source, config.PositionSymbols):
        return PositionSymbols(width, max_length, draw)
    if isinstance(source, config.RelativeSymbols):
        return RelativeSymbols(width, max_length, source.distance, draw)
    if isinstance(source, config.SymbolicAttention) and not isinstance(source, config.RelationalSymbols):
        return SymbolicAttention(source, dim, draw)
    raise ValueError(f"polyhead.jaxside: symbols={type(source).__name__}() exists in PyTorch only")


def by_offset(table: Array, t: int, s: int, first: int) -> Array:
    """Rows of a table by clipped offset: row j - i + t - 1 for query i, which is token `first` + i, and key j."""
    distance = table.shape[0] // 2
    offset = jnp.arange(1 - t - first, s - first)
    return table[jnp.clip(offset, -distance, distance) + distance]
