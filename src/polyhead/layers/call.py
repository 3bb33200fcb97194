"""What a call of a layer is given beside its input: checked in one place, and cut up for its groups of heads."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from polyhead.layers.cache import LayerCache
from polyhead.layers.positions import places_in
from polyhead.ops.call import AttentionCall

WHO = "MultiHeadAttention"


def no_script(module: nn.Module) -> NoReturn:
    """What `torch.jit.script` calls first."""
    raise ValueError(f"{type(module).__name__}: TorchScript cannot compile it; use torch.compile or torch.export")


@dataclass(frozen=True)
class Call:
    """Who looks at whom in one call: `t` queries of `x` at `s` keys, of `x` and what went before or of a context.

    `past`: tokens of x that `memory` has seen before, of which it has dropped the first `gone` and goes on to hold the
    last `span` (None: all).  `first`: what query 0 is among the keys, for relative symbols.
    """

    x: Tensor
    context: Tensor | None
    memory: LayerCache | None
    past: int
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
    def source(self) -> Tensor:
        return self.x if self.context is None else self.context

    @property
    def new_senders(self) -> bool:
        """Whether keys and values are still to be made: those of a context are made once."""
        return self.context is None or self.memory is None or self.past == 0

    def remember(self, name: Hashable, new: Tensor) -> Tensor:
        """`new` of the tokens x, after what the cache holds of those before."""
        assert self.memory is not None
        return self.memory.last(name, new, self.span)

    def held(self, array: Tensor | None) -> Tensor | None:
        """A mask, bias or dropout mask over all keys there have been, cut to those that are still held."""
        return array if array is None or not self.gone or array.shape[-1] == 1 else array[..., self.gone :]

    def counted(self, *, queries: bool) -> Tensor:
        """(1 t) or (1 s): where tokens are if no positions are given, those of packed sequences each in its own."""
        if self.cu_seqlens is not None:
            return places_in(self.cu_seqlens, self.t)
        start = self.past if queries or self.context is None else 0
        rows = self.t if queries or self.context is None else self.s
        return torch.arange(start, start + rows, device=self.x.device)[None]

    def where_keys_are(self) -> Tensor:
        """(b|1 s), those of earlier tokens included."""
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
) -> Call:
    """The `Call` of a layer of width `dim`; what the cache remembers of positions grows.

    Raises ValueError for another width, and for what does not go together with a cache or with packed sequences.
    """
    if x.shape[-1] != dim:
        raise ValueError(f"{WHO}: m = {dim} but x (b t m) = {tuple(x.shape)}")
    if cache is not None and causal != (context is None):
        wanted = "be causal" if context is None else "not be causal, to another sequence"
        raise ValueError(f"{WHO}: attention with a cache must {wanted}")
    if cu_seqlens is not None and (context is not None or cache is not None or x.shape[0] != 1):
        given = "no" if context is None and cache is None else "a cache" if context is None else "a context"
        raise ValueError(
            f"{WHO}: cu_seqlens cut x (1 t m) into sequences, without a context or a cache, "
            f"but x (b t m) = {tuple(x.shape)} and {given} came"
        )
    memory = cache if cache is None or context is None else cache.cross
    past = 0 if memory is None else memory.length
    gone, span, keys = 0, None, positions if context is None else None
    if memory is not None and context is None:
        if past and ("positions" in memory) != (positions is not None):
            raise ValueError(f"{WHO}: with a cache, positions must be given in every call or in none")
        gone = memory.gone
        # Padding after a real token takes places but no positions: then what is far behind may still be in the window.
        span = None if window is None or (positions is not None and memory.gaps) else window - 1
        keys = None if positions is None else memory.last("positions", positions, span)
    s = past - gone + x.shape[1] if context is None else context.shape[1]
    first = (s - x.shape[1] if causal else past) if first is None else first
    return Call(x, context, memory, past, gone, span, s, first, positions, keys, cu_seqlens)


def check(wanted: tuple[int, int, int, int], mask: Tensor | None, bias: Tensor | None, keep: Tensor | None) -> None:
    """Raise a ValueError unless mask, bias and keep fit (b h t s) = `wanted`."""
    if mask is not None and not _broadcasts(mask.shape, wanted):
        came = tuple(mask.shape)
        hint = "; of keys it is mask[:, None, None]" if came == (wanted[0], wanted[3]) else ""
        raise ValueError(f"{WHO}: mask must broadcast to (b h t s) = {wanted} but is {came}{hint}")
    if bias is not None and not (bias.ndim == 4 and _broadcasts(bias.shape, wanted)):
        by_offset = (wanted[1], wanted[2] + wanted[3] - 1)
        if tuple(bias.shape) != by_offset:
            shape = tuple(bias.shape)
            raise ValueError(f"{WHO}: bias must be (b h t s) = {wanted} or (h t+s-1) = {by_offset} but is {shape}")
    # Queries and keys written out, as the backends want them; only batch and heads may be shared.
    if keep is not None and not (keep.shape[-2:] == wanted[2:] and keep.ndim == 4 and _broadcasts(keep.shape, wanted)):
        raise ValueError(f"{WHO}: keep must be (b|1 h|1 t s), here {wanted}, but is {tuple(keep.shape)}")


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


@dataclass(frozen=True)
class Limits:
    """Who may look at whom, and what is added to scores or drops codes, for all heads of a layer."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    keep: Tensor | None = None
    causal: bool = False
    window: int | None = None
    cu_seqlens: Tensor | None = None

    def call(self, made: Mapping[str, Tensor], first: int, last: int) -> AttentionCall:
        """The call of the heads `first` to `last`, whose tensors are given."""
        bias, mask, keep = (heads_of(array, first, last) for array in (self.bias, self.mask, self.keep))
        return AttentionCall(
            made["q"], made["k"], made["v"], bias, mask, keep, self.causal, self.window, self.cu_seqlens,
            q_rel=made.get("q_rel"), k_rel=made.get("k_rel"),
        )  # fmt: skip


def heads_of(array: Tensor | None, first: int, last: int) -> Tensor | None:
    """The heads `first` to `last` of a bias (b h t s) or (h t+s-1), a mask of 1 to 4 dimensions or a dropout mask."""
    if array is None or array.ndim == 1:
        return array
    if array.ndim == 2:  # by offset if floating; a (t s) mask is for all heads
        return array[first:last] if array.is_floating_point() else array
    return array if array.shape[-3] == 1 else array[..., first:last, :, :]


def symbols_of(
    symbols: Tensor | Sequence[Tensor | None], widths: Sequence[int | None], call: Call
) -> Sequence[Tensor | None]:
    """The symbols of each group, whose width is in `widths` (None: it takes none).

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


def _check_symbols(symbols: Tensor, width: int, call: Call) -> None:
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
