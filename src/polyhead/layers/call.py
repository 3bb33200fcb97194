"""The arguments of a layer's call: checked in one place, and divided among its groups of heads."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyhead.layers.cache import LayerCache
from polyhead.layers.positions import places_in
from polyhead.ops.call import NOTHING_HIDDEN, AttentionCall, Masks
from polyhead.ops.latent_code import of_pairs

# The name in error messages.
LAYER = "MultiHeadAttention"


def no_script(module: nn.Module) -> NoReturn:
    """Raises ValueError; `torch.jit.script` calls it first."""
    raise ValueError(f"{type(module).__name__}: TorchScript cannot compile it; use torch.compile or torch.export")


# ---------------------------------------------------------------------------------------------------- queries and keys
@dataclass(frozen=True)
class LayerCall:
    """The tokens of one call: `t` queries from `x`, and `s` keys from `x` and cached tokens, or from a context.

    Attributes:
        cache: The cache of the keys.
        num_cached: Number of earlier tokens.
        offset: The position of query 0 minus that of the first key of all, if no positions are given.
        first_query: Index of query 0 among the keys, for relative symbols.
        positions: The positions given for x.
        gone: How many of the earlier tokens the cache has dropped.
        max_cached: How many tokens the cache stores after this call; None: all.
        key_positions: The positions of all keys; None: they count from 0.
    """

    x: Tensor
    context: Tensor | None
    cache: LayerCache | None
    num_cached: int
    offset: int
    s: int
    first_query: int
    positions: Tensor | None
    gone: int = 0
    max_cached: int | None = None
    key_positions: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def t(self) -> int:
        return self.x.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a query nor a key, so that a tensor by offset would have -1 rows."""
        return self.t + self.s == 0

    @property
    def key_source(self) -> Tensor:
        """The tokens from which new keys and values are computed."""
        if self.context is None:
            return self.x
        return self.context

    @property
    def computes_keys(self) -> bool:
        """Whether keys and values must be computed: those of a cached context are computed only once."""
        return self.context is None or self.cache is None or self.num_cached == 0

    def append_to_cache(self, name: Hashable, new: Tensor) -> Tensor:
        """The cached tensors of earlier tokens followed by `new`, those of x."""
        assert self.cache is not None
        return _append(self.cache, name, new, self.x.shape[0], self.max_cached)

    def real_keys(self, mask: Tensor | None) -> Tensor | None:
        """Which of the new keys (b s) are real, as the cache or a mask of keys says; None if neither does.

        With a single query a mask (t s) or (h t s) may also be a row of a mask of pairs, so only (b|1, 1, 1, s) counts.
        """
        if self.context is None and self.cache is not None and self.cache.real is not None:
            return self.cache.real[:, -self.t :] if self.t else self.cache.real[:, :0]
        if mask is None or not Masks(mask).is_of_keys or (self.t == 1 and mask.ndim in (2, 3)):
            return None
        b, s = self.key_source.shape[:2]
        keys = of_pairs(mask)[:, 0, 0]
        if keys.shape[1] > 1:
            keys = keys[:, keys.shape[1] - s :]
        return keys.expand(b, s)

    def held(self, pairs: Tensor | None) -> Tensor | None:
        """A mask, bias or dropout mask over all keys so far, cut to the keys that the cache still holds."""
        if pairs is None or self.gone == 0:
            return pairs
        if pairs.shape[-1] == 1 and self.gone + self.s > 1:  # one number for all keys
            return pairs
        return pairs[..., self.gone :]

    def query_positions(self) -> Tensor:
        """The positions of the queries (b|1 t): given ones or, in each packed sequence, 0, 1, ..."""
        if self.positions is not None:
            return self.positions
        if self.cu_seqlens is not None:
            return places_in(self.cu_seqlens, self.t)
        return self._count_from(self.offset, self.t)

    def new_key_positions(self) -> Tensor:
        """The positions of the keys that this call computes (b|1 t), or of a context (1 s)."""
        if self.context is None:
            return self.query_positions()
        return self._count_from(-self.offset, self.s)

    def all_key_positions(self) -> Tensor:
        """The positions of the keys (b|1 s), those of cached tokens included."""
        if self.key_positions is None:
            return self._count_from(0, self.s)
        return self.key_positions

    def _count_from(self, first: int, count: int) -> Tensor:
        """Positions (1 count) from `first` on, or from 0 if it is negative."""
        first = max(0, first)
        return torch.arange(first, first + count, device=self.x.device)[None]


def call_of(
    layer: Any,
    x: Tensor,
    context: Tensor | None,
    *,
    positions: Tensor | None,
    first: int | None,
    cu_seqlens: Tensor | None,
    cache: LayerCache | None,
) -> LayerCall:
    """The `LayerCall` of a `layer`, a MultiHeadAttention; given positions are appended to the cache.

    Raises:
        ValueError: For a wrong width, for arguments that a cache or packed sequences exclude, and for a cache of
            another layer.
    """
    if x.shape[-1] != layer.dim:
        raise ValueError(f"{LAYER}: m = {layer.dim} but x (b t m) = {tuple(x.shape)}")
    if positions is not None:
        if positions.is_floating_point():
            raise ValueError(f"{LAYER}: positions must be integers but are {positions.dtype}")
        positions = positions.long()  # distances of int8 are at most 127
    _check_exclusions(x, context, layer.causal, cu_seqlens, cache)
    if context is not None:
        return _cross_call(layer, x, context, positions, first, None if cache is None else cache.cross)
    return _self_call(layer, x, positions, first, cu_seqlens, cache)


def _cross_call(
    layer: Any, x: Tensor, context: Tensor, positions: Tensor | None, first: int | None, cache: LayerCache | None
) -> LayerCall:
    """The call of cross-attention: the keys are those of the context; a `cache` holds them from the first call on."""
    t, s, num_cached = x.shape[1], context.shape[1], 0
    if cache is not None:
        cache.claim(LAYER, layer)
        num_cached, num_keys = cache.length, cache.context_length(default=s)
        if num_keys != s:
            raise ValueError(f"{LAYER}: the cache is of a context of {num_keys} tokens, got one of {s}")
    # A causal layer aligns the last query with the last key.  Positions count from 0: with a negative offset query 0 is
    # at 0, and key 0 at -offset.
    aligned = s - t if layer.causal else num_cached
    offset = aligned if positions is None else num_cached
    first = aligned if first is None else first
    return LayerCall(x, context, cache, num_cached, offset, s, first, positions)


def _self_call(
    layer: Any,
    x: Tensor,
    positions: Tensor | None,
    first: int | None,
    cu_seqlens: Tensor | None,
    cache: LayerCache | None,
) -> LayerCall:
    """The call of self-attention: the keys are the tokens that the cache still holds, then those of x."""
    num_cached, gone, max_cached, key_positions = 0, 0, None, positions
    if cache is not None:
        cache.claim(LAYER, layer)
        num_cached, gone = cache.length, cache.gone
        _check_cache(cache, x, positions)
        # Padding has an index but no position, so a key may be inside the window by position though not by index.  A
        # cache that was told of a mask keeps all tokens, whatever the mask says: its size depends on no values.
        if layer.window is not None and (positions is None or cache.real is None):
            max_cached = layer.window - 1
        if positions is not None:
            if "positions" not in cache and num_cached > gone:  # tokens of calls without positions are at their indices
                cache.put("positions", torch.arange(gone, num_cached, dtype=positions.dtype, device=x.device)[None])
            key_positions = _append(cache, "positions", positions, x.shape[0], max_cached)
    s = num_cached - gone + x.shape[1]
    if first is None:
        first = s - x.shape[1] if layer.causal else num_cached
    return LayerCall(
        x, None, cache, num_cached, num_cached, s, first, positions, gone, max_cached, key_positions, cu_seqlens
    )


def _append(cache: LayerCache, name: Hashable, new: Tensor, batch: int, max_cached: int | None) -> Tensor:
    """What is stored under `name` (b|1 s ...), followed by `new` (b|1 t ...).

    Positions, and the symbols of positions, may be shared by all sequences (1 ...) in one call and not in another.
    """
    cached = cache.state(name)
    if cached is not None and cached.shape[0] != new.shape[0]:
        cache.put(name, cached.expand(batch, *cached.shape[1:]))
        new = new.expand(batch, *new.shape[1:])
    return cache.extend(name, new, max_cached)


# ---------------------------------------------------------------------------------------------------- checks of a call
def _check_exclusions(
    x: Tensor, context: Tensor | None, causal: bool, cu_seqlens: Tensor | None, cache: LayerCache | None
) -> None:
    """Raise ValueError if a cache or packed sequences exclude an argument."""
    if cache is not None and context is None and not causal:
        raise ValueError(f"{LAYER}: attention with a cache must be causal")
    if cache is not None and context is not None and causal:
        raise ValueError(f"{LAYER}: attention with a cache must not be causal, to another sequence")
    if cu_seqlens is not None and (context is not None or cache is not None or x.shape[0] != 1):
        others = {" and a context": context, " and a cache": cache}
        extra = next((name for name, value in others.items() if value is not None), "")
        raise ValueError(
            f"{LAYER}: cu_seqlens cut x (1 t m) into sequences, without a context or a cache, "
            f"got x (b t m) = {tuple(x.shape)}{extra}"
        )


def _check_cache(cache: LayerCache, x: Tensor, positions: Tensor | None) -> None:
    """Raise ValueError for another number of sequences, unannounced tokens, and positions that are no longer given."""
    if cache.length and cache.batch != x.shape[0]:
        raise ValueError(f"{LAYER}: its cache holds {cache.batch} sequences but x (b t m) = {tuple(x.shape)}")
    if cache.length and positions is None and "positions" in cache:
        raise ValueError(f"{LAYER}: an earlier call with this cache gave positions; give those of the new tokens, too")
    if cache.real is not None and cache.real.shape[1] != cache.length - cache.gone + x.shape[1]:
        announced = cache.real.shape[1] - (cache.length - cache.gone)
        raise ValueError(
            f"{LAYER}: its cache has padding, so `expect` must announce the tokens of every call, but it announced "
            f"{announced}, got {x.shape[1]}"
        )


def check_pairs(
    shape: tuple[int, int, int, int], mask: Tensor | None, bias: Tensor | None, keep: Tensor | None
) -> None:
    """Raise ValueError unless mask, bias and keep match (b h t s) = `shape`."""
    b, h, t, s = shape
    if mask is not None and not _broadcasts(mask.shape, shape):
        hint = "; of keys it is mask[:, None, None]" if mask.shape == (b, s) else ""
        raise ValueError(f"{LAYER}: mask must broadcast to (b h t s) = {shape} but is {tuple(mask.shape)}{hint}")
    by_offset = (h, t + s - 1)
    if bias is not None and not _is_dense(bias, shape) and bias.shape != by_offset:
        kinds = f"(b|1 h|1 t s), here {shape}, or (h t+s-1) = {by_offset}"
        raise ValueError(f"{LAYER}: bias must be {kinds} but is {tuple(bias.shape)}")
    if keep is not None and not _is_dense(keep, shape):
        raise ValueError(f"{LAYER}: keep must be (b|1 h|1 t s), here {shape}, but is {tuple(keep.shape)}")


def _is_dense(pairs: Tensor, shape: tuple[int, int, int, int]) -> bool:
    """Whether it is (b|1 h|1 t s): the ops need the dimensions of queries and keys in full."""
    return pairs.ndim == 4 and pairs.shape[-2:] == shape[2:] and _broadcasts(pairs.shape, shape)


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, target_size) for size, target_size in sizes)


# ---------------------------------------------------------------------------------------------------------------- masks
@dataclass(frozen=True)
class LayerLimits:
    """Masks, bias, dropout, soft cap and sinks of one call, for all heads of a layer."""

    bias: Tensor | None = None
    masks: Masks = NOTHING_HIDDEN
    keep: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # of all heads
    has_pairs: bool = False  # whether the call has a bias, mask or keep beside the padding in a cache

    def call(self, tensors: Mapping[str, Tensor], first: int, last: int) -> AttentionCall:
        """The `AttentionCall` of the heads `first` to `last`, given their tensors."""
        return AttentionCall(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            bias=pairs_of_heads(self.bias, first, last),
            masks=self.masks.of_heads(first, last),
            keep=pairs_of_heads(self.keep, first, last),
            q_rel=tensors.get("q_rel"),
            k_rel=tensors.get("k_rel"),
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[first:last],
        )


def pairs_of_heads(pairs: Tensor | None, first: int, last: int) -> Tensor | None:
    """Heads `first` to `last` of a bias (b h t s) or (h t+s-1), or of a dropout mask."""
    if pairs is None:
        return None
    if pairs.ndim == 2:  # by offset
        return pairs[first:last]
    if pairs.shape[-3] == 1:
        return pairs
    return pairs[..., first:last, :, :]


def drawn_keep(shape: Sequence[int], rate: float, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A dropout mask: entries are 0 or 1 / (1 - rate), and with a rate of 1 all are 0."""
    # In float32 by any default: bfloat16 has 256 steps between 0 and 1, which makes three of a rate of 0.001.
    draw = torch.rand(shape, device=device, dtype=torch.float32)
    return (draw >= rate).to(dtype) / ((1.0 - rate) or 1.0)


# -------------------------------------------------------------------------------------------------------------- symbols
def symbols_of_groups(
    symbols: Tensor | Sequence[Tensor | None], widths: Sequence[int | None], call: LayerCall
) -> Sequence[Tensor | None]:
    """The symbols of each group; `widths` has their widths (None for a group without symbols).

    Raises:
        ValueError: Unless each group's are (b|1 s m), or a table (2 distance + 1, m), of x's dtype.
    """
    if not isinstance(symbols, (Tensor, list, tuple)):
        kind = type(symbols).__name__
        raise ValueError(f"{LAYER}: symbols must be a Tensor, or a list of one (or None) a group, but are a {kind}")
    if isinstance(symbols, Tensor):
        symbols = [symbols] * len(widths)
    by_group = list(symbols)
    if len(by_group) != len(widths):
        counts = f"{len(widths)}, not {len(by_group)}"
        raise ValueError(f"{LAYER}: symbols must be one tensor or one (or None) a group: {counts}")
    for i, (of_group, width) in enumerate(zip(by_group, widths, strict=True)):
        if width is None:
            continue
        if of_group is None:
            raise ValueError(f"{LAYER}: group {i} takes symbols, of width {width}, but there are none for it")
        if not isinstance(of_group, Tensor):
            raise ValueError(f"{LAYER}: symbols of group {i} must be a Tensor but are a {type(of_group).__name__}")
        _check_symbols(of_group, width, call)
    return by_group


def _check_symbols(symbols: Tensor, width: int, call: LayerCall) -> None:
    shape, dtype = tuple(symbols.shape), call.x.dtype
    b, s = call.key_source.shape[:2]
    if symbols.dtype != dtype and not torch.is_autocast_enabled(call.x.device.type):
        raise ValueError(f"{LAYER}: symbols must have x's dtype, {dtype}, but are {symbols.dtype}")
    is_table = symbols.ndim == 2 and shape[1] == width
    if is_table and shape[0] % 2 == 0:
        raise ValueError(f"{LAYER}: a table of relative symbols has 2 distance + 1 rows, an odd number, not {shape[0]}")
    is_by_key = symbols.ndim == 3 and shape[0] in (1, b) and shape[1:] == (s, width)
    if not is_table and not is_by_key:
        kinds = f"(b|1 s m) = ({b}, {s}, {width}) or, if relative, a table (2 distance + 1, m)"
        raise ValueError(f"{LAYER}: symbols must be {kinds} but are {shape}")
