"""Sources of symbols for relational heads: values that identify a token, by its place or by a choice of its features.

    symbolic     s_i = sum_n softmax_n(query(x_i) . template_n / sqrt(d)) library_n             each head its own part
    relational   the same, with map(softmax_j(q(x_i) . k(x_j))), j the neighbours of i, in place of x_i
    position     s_i = table_i
    relative     s_ij = table_(j - i), clipped: the symbol of key j for query i

Altabaa and Lafferty 2024, "Disentangling and integrating relational and sensory information in transformer
architectures", section 2.2; the relational source is from their code.  A source is called with the residual stream
(b s m) and returns symbols by key, (b|1 s dim), or a table by offset, (2 distance + 1, dim).
"""

import abc
import itertools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead import config
from polyhead.layers.cache import LayerCache
from polyhead.layers.device import Placement
from polyhead.layers.positions import places_in, starts_in
from polyhead.ops.rope import check_range
from polyhead.spec.shapes import shaped

# Default number of heads of symbolic attention, if it divides the widths.
SYMBOL_HEADS = 4

# A source outside of a model has no place in it, and so a key of its own in a cache.
_ALONE = (f"alone {n}" for n in itertools.count())


def _heads(heads: int | None, dim: int, symbol_dim: int) -> int:
    if heads is None:
        return math.gcd(SYMBOL_HEADS, dim, symbol_dim)
    if dim % heads or symbol_dim % heads:
        raise ValueError(f"SymbolicAttention: heads must divide {dim} and {symbol_dim} but is {heads}")
    return heads


class SymbolArguments(NamedTuple):
    """The arguments of a source beside x.

    Attributes:
        first: The position of x's first token.
        cache: Holds the tokens before x.
        cu_seqlens: Edges of packed sequences in x; positions and neighbours are separate for each sequence.
        positions: Replace `first`, `first` + 1, ... (b|1 s).
        mask: True at real tokens (b s).
    """

    first: int = 0
    cache: LayerCache | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None


class SymbolModule(nn.Module, abc.ABC):
    """The base of all sources of symbols; `symbol_dim` is the width of a symbol, `dim` that of x if it is read."""

    symbol_dim: int
    dim: int | None = None

    def forward(self, x: Float[Tensor, "b s m"], **arguments: Any) -> Float[Tensor, "..."]:
        """Symbols by key, (b|1 s symbol_dim), or a table by offset, (2 distance + 1, symbol_dim).

        Args:
            **arguments: Fields of `SymbolArguments`; a source ignores those that cannot change its symbols.

        Raises:
            ValueError: For a wrong shape or positions out of range, and if earlier tokens are needed without a cache.
                Given positions, and those of packed sequences, are checked only in eager mode.
        """
        width = self.dim or x.shape[-1]
        if x.ndim != 3 or x.shape[-1] != width:
            raise ValueError(f"{type(self).__name__}: m = {width} but x (b s m) = {tuple(x.shape)}")
        return self.symbols(x, SymbolArguments(**arguments))

    @abc.abstractmethod
    def symbols(self, x: Tensor, arguments: SymbolArguments) -> Tensor:
        """The symbols, as `forward` returns them: what a source defines."""


class SymbolicAttention(SymbolModule):
    """Each token retrieves from a library of `count` learned symbols, by softmax attention over their templates.

    If the library is not `trainable`, it is a random constant in the state dict, not a parameter; the templates are
    always learned.
    """

    def __init__(self, source: config.SymbolicAttention, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.dim = dim
        self.symbol_dim = source.dim or dim
        self.heads, count = _heads(source.heads, dim, self.symbol_dim), source.count
        self.query = nn.Linear(dim, dim, **placement)
        self.templates = nn.Parameter(torch.empty(count, dim, **placement))
        library = torch.empty(count, self.symbol_dim, **placement)
        self.library: Tensor
        if source.trainable:
            self.library = nn.Parameter(library)
        else:
            self.register_buffer("library", library)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Templates and library N(0, 1); the query map keeps the start of nn.Linear."""
        self.templates.normal_()
        self.library.normal_()

    @shaped
    def assignments(
        self, x: Float[Tensor, "b s m"], *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "b s h n"]:
        """How much of each symbol every token takes, for each head; adds up to 1 over symbols."""
        # Each head compares its part of the query (b s h d) with its part of all templates (n h d).
        q = self.query(x).unflatten(-1, (self.heads, -1))
        templates = self.templates.unflatten(-1, (self.heads, -1))
        return (torch.einsum("bshd,nhd->bshn", q, templates) * q.shape[-1] ** -0.5).softmax(-1)

    def symbols(self, x: Float[Tensor, "b s m"], arguments: SymbolArguments) -> Float[Tensor, "b s _"]:
        """Symbols (b s symbol_dim) of each token, which depend on no other token and no other argument."""
        # Each head mixes its part of the library (n h e); the mixtures (b s h e) stand side by side in a symbol.
        library = self.library.unflatten(-1, (self.heads, -1))
        return torch.einsum("bshn,nhe->bshe", self.assignments(x), library).flatten(2)


class RelationalSymbols(SymbolModule):
    """Symbolic attention that reads a token's relations to its neighbours, see `config.RelationalSymbols`.

    Neighbours are nearest first or, unless `causal`, from left to right.  Beyond the ends of the sequence the first or
    last token is used.  Padding is replaced by the real token before it, or after it if there is none.  Windows and
    masks of pairs hide no neighbours.  A softmax over neighbours has the scale (dim / relations) ** -0.5.

    Args:
        cache_key: A cache keeps the source's tokens under this name; sources that share a cache need different names.
    """

    def __init__(
        self,
        source: config.RelationalSymbols,
        dim: int,
        *,
        causal: bool = True,
        cache_key: Hashable = None,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        if cache_key is None:
            cache_key = next(_ALONE)
        self.cache_key = ("neighbours", cache_key)
        if dim % source.relations:
            raise ValueError(f"RelationalSymbols: relations must divide {dim} but is {source.relations}")
        self.dim, self.neighbours, self.relations = dim, source.neighbours, source.relations
        self.normalise, self.causal = source.normalise, causal
        if source.causal is not None:
            self.causal = source.causal
        # The offsets of a token's neighbours, such as (-1, -2) or (-1, 0, 1).
        steps = range(-source.neighbours, source.neighbours + 1)
        if self.causal:  # nearest first
            steps = range(0, -source.neighbours - 1, -1)
        self.steps = tuple(step for step in steps if step != 0 or source.include_self)
        self.q = nn.Linear(dim, dim, **placement)
        self.k = nn.Linear(dim, dim, **placement)
        self.map = nn.Linear(len(self.steps) * self.relations, dim, **placement)
        self.symbolic = SymbolicAttention(source, dim, **placement)
        self.symbol_dim = self.symbolic.symbol_dim

    def _with_neighbours(self, x: Tensor, arguments: SymbolArguments) -> Tensor:
        """The tokens before `x` that a cache holds, then `x` (b n m), with real tokens in place of padding."""
        cache, mask = arguments.cache, arguments.mask
        if cache is None:
            if mask is None:
                return x
            return in_place_of_padding(x, mask, arguments.cu_seqlens)[0]
        if not self.causal:
            raise ValueError("RelationalSymbols: neighbours after a token are not known yet: a cache needs causal=True")
        if arguments.first and self.cache_key not in cache:
            raise ValueError(
                f"RelationalSymbols: the cache has {arguments.first} tokens but not the neighbours among them"
            )
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        name = (*self.cache_key, "known")
        tokens, known = cache.extend(self.cache_key, x, self.neighbours), cache.extend(name, mask, self.neighbours)
        # Padding repeats a token of an earlier call, if need be, so the cache stores tokens as they are after this.
        tokens, known = in_place_of_padding(tokens, known, None)
        start = max(0, tokens.shape[1] - self.neighbours)
        cache.put(self.cache_key, tokens[:, start:].clone())
        cache.put(name, known[:, start:].clone())
        return tokens

    def _mapped_relations(self, x: Tensor, arguments: SymbolArguments) -> Tensor:
        """What symbolic attention reads in place of x (b s m): each token's relations to its neighbours, mapped."""
        if arguments.cache is None and arguments.first:
            raise ValueError(f"RelationalSymbols: first = {arguments.first} needs the tokens before it: give cache=")
        tokens = self._with_neighbours(x, arguments)
        x = tokens[:, tokens.shape[1] - x.shape[1] :]
        # The rows (s n) of each new token's neighbours among `tokens`, clipped to the ends of the sequence.
        indices = torch.arange(tokens.shape[1] - x.shape[1], tokens.shape[1], device=x.device)
        steps = torch.tensor(self.steps, device=x.device)  # (n)
        neighbours = (indices[:, None] + steps).clamp(0, tokens.shape[1] - 1)
        if arguments.cu_seqlens is not None:
            # Packed sequences have ends of their own: clip to the first and last row of each.
            starts = starts_in(arguments.cu_seqlens, x.shape[1])
            last = torch.searchsorted(starts, starts, right=True) - 1  # (s)
            neighbours = torch.minimum(torch.maximum(neighbours, starts[:, None]), last[:, None])
        q = self.q(x).unflatten(-1, (self.relations, -1))  # (b s r d)
        k = self.k(tokens).unflatten(-1, (self.relations, -1))[:, neighbours]  # (b s n r d)
        # Each relation r compares its part of the query with the same part of each neighbour n (b s n r).
        related = torch.einsum("bsrd,bsnrd->bsnr", q, k)
        if self.normalise:
            related = (related * q.shape[-1] ** -0.5).softmax(2)
        return self.map(related.flatten(2))

    def assignments(
        self, x: Float[Tensor, "b s m"], *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "b s h n"]:
        """How much of each symbol every token takes, for each head; adds up to 1 over symbols."""
        return self.symbolic.assignments(self._mapped_relations(x, SymbolArguments(cu_seqlens=cu_seqlens, mask=mask)))

    def symbols(self, x: Float[Tensor, "b s m"], arguments: SymbolArguments) -> Float[Tensor, "b s _"]:
        """Symbols (b s symbol_dim) of each token, by its relations to its neighbours."""
        return self.symbolic(self._mapped_relations(x, arguments))


def in_place_of_padding(x: Tensor, real: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` (b s m) with padding (`real` (b s) is False) replaced by the real token of its sequence before it or, if
    there is none, after it; and a mask of the tokens that have a real one at or before them."""
    indices = torch.arange(x.shape[1], device=x.device).expand(real.shape)  # (b s)
    last = torch.where(real, indices, -1).cummax(1).values  # the last real token so far
    following = torch.where(real, indices, x.shape[1] - 1).flip(1).cummin(1).values.flip(1)  # the next real token
    # In packed sequences the last real token may belong to an earlier sequence, and then does not count.
    known = last >= 0
    if cu_seqlens is not None:
        known = last >= starts_in(cu_seqlens, x.shape[1])
    index = torch.where(known, last, following)  # (b s)
    return x.gather(1, index[..., None].expand(x.shape)), known


class PositionSymbols(SymbolModule):
    """A learned symbol for each position; `table` is (max_length, dim)."""

    def __init__(
        self, source: config.PositionSymbols, dim: int, max_length: int, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.symbol_dim, self.max_length = source.dim or dim, max_length
        self.table = nn.Parameter(torch.empty(max_length, self.symbol_dim, **placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1)."""
        nn.init.normal_(self.table)

    def symbols(self, x: Float[Tensor, "b s m"], arguments: SymbolArguments) -> Float[Tensor, "_ s _"]:
        """The symbols of the positions of x, shared by the batch (1 s dim) unless `positions` are given."""
        if arguments.positions is not None:
            check_range("PositionSymbols", arguments.positions, self.max_length)
            return self.table[arguments.positions.long()]
        _check_length("PositionSymbols", x, arguments, self.max_length)
        if arguments.cu_seqlens is not None:
            return self.table[places_in(arguments.cu_seqlens, x.shape[1])]
        return self.table[None, arguments.first : arguments.first + x.shape[1]]


class RelativeSymbols(SymbolModule):
    """A learned symbol for each offset j - i of key and query.

    `table` is (2 distance + 1, dim), with offset 0 in row `distance`.  `distance` None means max_length - 1, and longer
    sequences are refused.  Otherwise larger offsets are clipped.
    """

    longest: int | None

    def __init__(
        self, source: config.RelativeSymbols, dim: int, max_length: int, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.symbol_dim = source.dim or dim
        self.longest, self.distance = None, source.distance or max_length - 1
        if source.distance is None:
            self.longest = max_length
        self.table = nn.Parameter(torch.empty(2 * self.distance + 1, self.symbol_dim, **placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, of variance 2 / (rows + dim) (Glorot and Bengio 2010), as in the paper's code."""
        nn.init.xavier_uniform_(self.table)

    def symbols(self, x: Float[Tensor, "b s m"], arguments: SymbolArguments) -> Float[Tensor, "_ _"]:
        """The table by offset of indices, also where `positions` are given; `x` only gives the length."""
        if self.longest is not None:
            _check_length("RelativeSymbols", x, arguments, self.longest, ": give distance= to clip offsets")
        return self.table

    def check_reach(self, t: int, s: int, first: int) -> None:
        """Raise ValueError for an offset without a symbol; of t queries the first is at index `first` of s keys."""
        largest = max(first + t, s - first) - 1
        if self.longest is not None and t and s and largest >= self.longest:
            text = f"offsets up to {largest} but max_length is {self.longest}: give distance= to clip offsets"
            raise ValueError(f"RelativeSymbols: {text}")


def _check_length(kind: str, x: Tensor, arguments: SymbolArguments, longest: int, advice: str = "") -> None:
    """Raise ValueError if a position that is counted exceeds `longest`."""
    last = arguments.first + x.shape[1]
    if last <= longest:  # then those of packed sequences are smaller, too
        return
    if arguments.cu_seqlens is None:
        raise ValueError(f"{kind}: {last} positions but max_length is {longest}{advice}")
    check_range(kind, places_in(arguments.cu_seqlens, x.shape[1]), longest)


def build_symbols(
    source: config.SymbolSource,
    dim: int,
    *,
    causal: bool = False,
    max_length: int = 512,
    cache_key: Hashable = None,
    **placement: Unpack[Placement],
) -> SymbolModule:
    """The module of a source of symbols for a model of width `dim`; `cache_key` is that of `RelationalSymbols`.

    Raises:
        ValueError: For an unknown source.
    """
    if not isinstance(source, config.SymbolSource):
        raise ValueError(f"build_symbols: symbols must be a source such as PositionSymbols() but is {source!r}")
    if isinstance(source, config.PositionSymbols):
        return PositionSymbols(source, dim, max_length, **placement)
    if isinstance(source, config.RelativeSymbols):
        return RelativeSymbols(source, dim, max_length, **placement)
    if isinstance(source, config.RelationalSymbols):
        return RelationalSymbols(source, dim, causal=causal, cache_key=cache_key, **placement)
    return SymbolicAttention(source, dim, **placement)


def start_std(source: config.SymbolSource, width: int, max_length: int) -> float:
    """The standard deviation of initial symbols in a model of this width, used to balance relations.

    It is 1 except for relative symbols, whose uniform table has the variance 2 / (rows + width).  Mixtures of a library
    have a smaller one, but their common part survives the mean over tokens, so their contribution to a head's output is
    within a factor of 2 to 4.
    """
    if not isinstance(source, config.RelativeSymbols):
        return 1.0
    distance = max_length - 1 if source.distance is None else source.distance
    return (2.0 / (2 * distance + 1 + (source.dim or width))) ** 0.5
