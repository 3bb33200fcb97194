"""The arguments of a layer's call: checked in one place, and divided among its groups of heads."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from polyhead.layers.cache import LayerCache
from polyhead.layers.device import Device
from polyhead.layers.positions import places_in
from polyhead.ops.call import AttentionCall

WHO = "MultiHeadAttention"


def no_script(module: nn.Module) -> NoReturn:
    """Raises ValueError; `torch.jit.script` calls it first."""
    raise ValueError(f"{type(module).__name__}: TorchScript cannot compile it; use torch.compile or torch.export")


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: `t` queries from `x`, and `s` keys from `x` and earlier tokens, or from a context.

    `memory` is the cache.  `past`: number of earlier tokens.  `gone`: how many of those the cache has dropped.  `span`:
    how many tokens it stores after this call (None: all).  `lead`: the position of query 0 minus that of the first key
    of all, if no positions are given.  `first`: index of query 0 among the keys, for relative symbols.
    """

    x: Tensor
    context: Tensor | None
    memory: LayerCache | None
    past: int
    lead: int
    gone: int
    span: int | None
    s: int
    first: int
    positions: Tensor | None
    key_positions: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def t(self) -> int:
        return self.x.shape[1]

    @property
    def empty(self) -> bool:
        """Whether there is neither a query nor a key, so that a tensor by offset would have -1 rows."""
        return self.t + self.s == 0

    @property
    def source(self) -> Tensor:
        return self.x if self.context is None else self.context

    @property
    def new_senders(self) -> bool:
        """Whether keys and values must be computed: those of a cached context are computed only once."""
        return self.context is None or self.memory is None or self.past == 0

    def remember(self, name: Hashable, new: Tensor) -> Tensor:
        """The cached tensors of earlier tokens followed by `new`, those of x."""
        assert self.memory is not None
        return _append(self.memory, name, new, self.x.shape[0], self.span)

    def held(self, array: Tensor | None) -> Tensor | None:
        """A mask, bias or dropout mask over all keys so far, cut to the keys that the cache still holds."""
        return array if array is None or not self.gone or array.shape[-1] == 1 else array[..., self.gone :]

    def counted(self, *, queries: bool) -> Tensor:
        """Default positions of queries (1 t) or keys (1 s), counted from 0 in each packed sequence."""
        if self.cu_seqlens is not None:
            return places_in(self.cu_seqlens, self.t)
        own = queries or self.context is None
        start, rows = (self.lead, self.t) if own else (-self.lead, self.s)
        return torch.arange(max(0, start), max(0, start) + rows, device=self.x.device)[None]

    def where_keys_are(self) -> Tensor:
        """Positions of the keys (b|1 s), those of cached tokens included."""
        return torch.arange(self.s, device=self.x.device)[None] if self.key_positions is None else self.key_positions


def call_of(
    x: Tensor,
    context: Tensor | None,
    *,
    dim: int,
    causal: bool,
    positions: Tensor | None,
    first: int | None,
    window: int | None,
    cu_seqlens: Tensor | None,
    cache: LayerCache | None,
    layer: nn.Module,
) -> LayerCall:
    """The `LayerCall` of a `layer` of width `dim`.  Given positions are appended to the cache.

    Raises ValueError for a wrong width, for arguments that a cache or packed sequences exclude, and for a cache of
    another layer.
    """
    if x.shape[-1] != dim:
        raise ValueError(f"{WHO}: m = {dim} but x (b t m) = {tuple(x.shape)}")
    _check_exclusions(x, context, causal, cu_seqlens, cache)
    if cache is not None:
        (cache if context is None else cache.cross).claim(WHO, layer)
    if context is not None:
        return _to_context(x, context, causal=causal, positions=positions, first=first, cache=cache)
    return _to_itself(
        x, causal=causal, positions=positions, first=first, window=window, cu_seqlens=cu_seqlens, cache=cache
    )


def _to_context(
    x: Tensor,
    context: Tensor,
    *,
    causal: bool,
    positions: Tensor | None,
    first: int | None,
    cache: LayerCache | None,
) -> LayerCall:
    """Cross-attention.  A causal one aligns the last query with the last key, unless positions are given."""
    t, s = x.shape[1], context.shape[1]
    memory = None if cache is None else cache.cross
    past = 0 if memory is None else memory.length
    if memory is not None and (seen := memory.senders(s)) != s:
        raise ValueError(f"{WHO}: the cache is that of a context of {seen} tokens but one of {s} came")
    aligned = s - t if causal else past
    return LayerCall(
        x, context, memory, past=past, lead=aligned if positions is None else past, gone=0, span=None, s=s,
        first=aligned if first is None else first, positions=positions, key_positions=None, cu_seqlens=None,
    )  # fmt: skip


def _to_itself(
    x: Tensor,
    *,
    causal: bool,
    positions: Tensor | None,
    first: int | None,
    window: int | None,
    cu_seqlens: Tensor | None,
    cache: LayerCache | None,
) -> LayerCall:
    """Self-attention: the keys are the tokens that the cache still holds, then those of x."""
    t = x.shape[1]
    past, gone, span, key_positions = 0, 0, None, positions
    if cache is not None:
        if cache.length and cache.batch != x.shape[0]:
            raise ValueError(f"{WHO}: its cache holds {cache.batch} sequences but x (b t m) = {tuple(x.shape)}")
        past, gone, span = cache.length, cache.gone, _span(cache, positions, window)
        _check_announced(cache, past - gone + t, t)
        if positions is not None:
            if "positions" not in cache and past > gone:  # tokens of calls without positions are at their indices
                cache.put("positions", torch.arange(gone, past, dtype=positions.dtype, device=x.device)[None])
            key_positions = _append(cache, "positions", positions, x.shape[0], span)
    s = past - gone + t
    if first is None:
        first = s - t if causal else past
    return LayerCall(
        x, None, cache, past=past, lead=past, gone=gone, span=span, s=s, first=first, positions=positions,
        key_positions=key_positions, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _check_exclusions(
    x: Tensor, context: Tensor | None, causal: bool, cu_seqlens: Tensor | None, cache: LayerCache | None
) -> None:
    """Raise ValueError if a cache or packed sequences exclude an argument."""
    if cache is not None and causal != (context is None):
        wanted = "be causal" if context is None else "not be causal, to another sequence"
        raise ValueError(f"{WHO}: attention with a cache must {wanted}")
    if cu_seqlens is not None and (context is not None or cache is not None or x.shape[0] != 1):
        given = "no" if context is None and cache is None else "a cache" if context is None else "a context"
        raise ValueError(
            f"{WHO}: cu_seqlens cut x (1 t m) into sequences, without a context or a cache, "
            f"but x (b t m) = {tuple(x.shape)} and {given} came"
        )


def _check_announced(cache: LayerCache, s: int, t: int) -> None:
    """Raise ValueError if the cache knows the padding of some keys, but not of all `s`."""
    if cache.real is not None and cache.real.shape[1] != s:
        announced = cache.real.shape[1] - (s - t)
        raise ValueError(
            f"{WHO}: its cache has padding, so `expect` must announce the tokens of every call, but it announced "
            f"{announced} and {t} came"
        )


def _span(cache: LayerCache, positions: Tensor | None, window: int | None) -> int | None:
    """How many tokens a self-attention stores after this call (None: all).

    Padding has an index but no position, so a key may be inside the window by position though not by index.  A cache
    that was told of a mask therefore keeps all tokens, whatever the mask says: its size does not depend on values.
    """
    if cache.length and positions is None and "positions" in cache:
        raise ValueError(f"{WHO}: an earlier call with this cache gave positions; give those of the new tokens, too")
    if window is None or (positions is not None and cache.real is not None):
        return None
    return window - 1


def _append(cache: LayerCache, name: Hashable, new: Tensor, batch: int, span: int | None) -> Tensor:
    """What is stored under `name` (b|1 s ...), followed by `new` (b|1 t ...).

    Positions, and the symbols of positions, may be shared by all sequences (1 ...) in one call and not in another.
    """
    cached = cache.state(name)
    if cached is not None and cached.shape[0] != new.shape[0]:
        cache.put(name, cached.expand(batch, *cached.shape[1:]))
        new = new.expand(batch, *new.shape[1:])
    return cache.last(name, new, span)


def check(wanted: tuple[int, int, int, int], mask: Tensor | None, bias: Tensor | None, keep: Tensor | None) -> None:
    """Raise ValueError unless mask, bias and keep match (b h t s) = `wanted`."""
    if mask is not None and not _broadcasts(mask.shape, wanted):
        came = tuple(mask.shape)
        hint = "; of keys it is mask[:, None, None]" if came == (wanted[0], wanted[3]) else ""
        raise ValueError(f"{WHO}: mask must broadcast to (b h t s) = {wanted} but is {came}{hint}")
    by_offset = (wanted[1], wanted[2] + wanted[3] - 1)
    if bias is not None and not _is_dense(bias, wanted) and tuple(bias.shape) != by_offset:
        shape = tuple(bias.shape)
        raise ValueError(f"{WHO}: bias must be (b|1 h|1 t s), here {wanted}, or (h t+s-1) = {by_offset} but is {shape}")
    if keep is not None and not _is_dense(keep, wanted):
        raise ValueError(f"{WHO}: keep must be (b|1 h|1 t s), here {wanted}, but is {tuple(keep.shape)}")


def _is_dense(array: Tensor, wanted: tuple[int, int, int, int]) -> bool:
    """Whether it is (b|1 h|1 t s): the ops need the dimensions of queries and keys in full."""
    return array.ndim == 4 and array.shape[-2:] == wanted[2:] and _broadcasts(array.shape, wanted)


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


@dataclass(frozen=True)
class LayerLimits:
    """Masks, bias and dropout of one call, for all heads of a layer."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    keep: Tensor | None = None
    causal: bool = False
    window: int | None = None
    cu_seqlens: Tensor | None = None

    def call(self, made: Mapping[str, Tensor], first: int, last: int) -> AttentionCall:
        """The `AttentionCall` of the heads `first` to `last`, given their tensors."""
        bias, mask, keep = (heads_of(array, first, last) for array in (self.bias, self.mask, self.keep))
        return AttentionCall(
            made["q"], made["k"], made["v"], bias, mask, keep, self.causal, self.window, self.cu_seqlens,
            q_rel=made.get("q_rel"), k_rel=made.get("k_rel"),
        )  # fmt: skip


def drawn_keep(
    shape: Sequence[int],
    rate: float,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A dropout mask: entries are 0 or 1 / (1 - rate), and with a rate of 1 all are 0."""
    # In float32 by any default: bfloat16 has 256 steps between 0 and 1, which makes three of a rate of 0.001.
    draw = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
    return (draw >= rate).to(dtype or torch.get_default_dtype()) / ((1.0 - rate) or 1.0)


def heads_of(array: Tensor | None, first: int, last: int) -> Tensor | None:
    """Heads `first` to `last` of a bias (b h t s) or (h t+s-1), a mask of 1 to 4 dimensions or a dropout mask."""
    if array is None or array.ndim == 1:
        return array
    if array.ndim == 2:  # a bias by offset is floating; a (t s) mask is shared by all heads
        return array[first:last] if array.is_floating_point() else array
    return array if array.shape[-3] == 1 else array[..., first:last, :, :]


def symbols_of(
    symbols: Tensor | Sequence[Tensor | None], widths: Sequence[int | None], call: LayerCall
) -> Sequence[Tensor | None]:
    """The symbols of each group; `widths` has their widths (None for a group without symbols).

    Raises ValueError unless each is (b|1 s m) or a table of 2 distance + 1 rows, of x's dtype.
    """
    if not isinstance(symbols, (Tensor, list, tuple)):
        kind = type(symbols).__name__
        raise ValueError(f"{WHO}: symbols must be a Tensor, or a list of one (or None) a group, but are a {kind}")
    each: Sequence[Tensor | None] = [symbols] * len(widths) if isinstance(symbols, Tensor) else list(symbols)
    if len(each) != len(widths):
        raise ValueError(f"{WHO}: symbols must be one tensor or one (or None) a group: {len(widths)}, not {len(each)}")
    for i, (given, width) in enumerate(zip(each, widths, strict=True)):
        if width is None:
            continue
        if given is None:
            raise ValueError(f"{WHO}: group {i} takes symbols, of width {width}, but there are none for it")
        if not isinstance(given, Tensor):
            raise ValueError(f"{WHO}: symbols of group {i} must be a Tensor but are a {type(given).__name__}")
        _check_symbols(given, width, call)
    return each


def _check_symbols(symbols: Tensor, width: int, call: LayerCall) -> None:
    shape, (b, s), dtype = tuple(symbols.shape), call.source.shape[:2], call.x.dtype
    if symbols.dtype != dtype and not torch.is_autocast_enabled(call.x.device.type):
        raise ValueError(f"{WHO}: symbols must have x's dtype, {dtype}, but are {symbols.dtype}")
    if symbols.ndim == 2 and shape[1] == width:
        if shape[0] % 2 == 0:
            raise ValueError(
                f"{WHO}: a table of relative symbols has 2 distance + 1 rows, an odd number, not {shape[0]}"
            )
    elif symbols.ndim != 3 or shape[0] not in (1, b) or shape[1:] != (s, width):
        raise ValueError(
            f"{WHO}: symbols must be (b|1 s m) = ({b}, {s}, {width}) or, if relative, a table (2 distance + 1, m) "
            f"but are {shape}"
        )
