"""Our heads inside attention modules of other libraries: the parts that all replacements share."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polyhead import config
from polyhead.compat.foreign import unread
from polyhead.config.mechanisms import check_shared
from polyhead.layers.cache import LayerCache
from polyhead.layers.call import drawn_keep, no_script
from polyhead.layers.device import Device
from polyhead.layers.heads.functions import asked, attended, compiled, is_own
from polyhead.layers.heads.groups import SymbolGroup, build
from polyhead.layers.projection import Rows, by_offset
from polyhead.layers.symbols import RelativeSymbols, SymbolModule, build_symbols
from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import at_least_float32
from polyhead.spec.table import NORMALISE, SOFTMAX_AXIS

Heads = config.Mechanism | Sequence[config.Mechanism] | None
LOW = -9e3
"""Libraries add -1e4, -1e9 and the like in place of -inf.  It hides a pair from a softmax over keys only."""


class Groups(nn.Module):
    """Groups of heads, and the sources of their symbols."""

    __prepare_scriptable__ = no_script

    def add_groups(
        self,
        who: str,
        heads: config.Heads,
        width: int,
        *,
        bias: bool,
        max_length: int,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the groups for a model of this width, and each distinct source of symbols once."""
        total = sum(mechanism.heads for mechanism in heads)
        groups = [
            build(mechanism, width, total, bias=bias, max_length=max_length, device=device, dtype=dtype)
            for mechanism in heads
        ]
        self.sizes, self.shared = [group.sizes for group in groups], [mechanism.share for mechanism in heads]
        self.heads_of = list(pairwise((0, *accumulate(size.heads for size in self.sizes))))
        check_shared(who, heads, self.sizes)
        named = [group.symbols if isinstance(group, config.SymbolHeads) else None for group in heads]
        distinct = [source for source in dict.fromkeys(named) if source is not None]
        self.source_of = [None if source is None else distinct.index(source) for source in named]
        self.groups = nn.ModuleList(groups)
        self.symbols = nn.ModuleList(
            build_symbols(source, width, causal=causal, max_length=max_length, device=device, dtype=dtype)
            for source in distinct
        )

    def own_groups(self) -> list[Any]:
        """The groups of heads, or their wrappers."""
        return list(self.groups)


class OurHeads(Groups):
    """The base class of an attention module that takes the place of another library's."""

    def check_widths(self, width: int) -> None:
        """Raise ValueError unless the queries, keys and values of every head have this width and are its own."""
        for size in self.sizes:
            came = (size.dim, size.value_dim, size.kv_heads)
            if came != (width, width, size.heads) or not {"q", "k"} <= set(size.takes):
                wanted = f"dim, value_dim = {width} and keys of their own"
                raise ValueError(
                    f"replace: heads must have {wanted} but {came[0]}, {came[1]} and kv_heads {came[2]} came"
                )

    @torch.no_grad()
    def map_symbols(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Map the symbols of relational heads by the rows of `weight` and `bias` that mapped their values before."""
        first = 0
        for group, size in zip(self.own_groups(), self.sizes, strict=True):
            mine, first = slice(first, first + size.heads * size.dim), first + size.heads * size.dim
            if not isinstance(group, SymbolGroup):
                continue
            if weight is not None and group.symbol_dim == weight.shape[1]:
                group.value.weight.copy_(weight[mine])
                if group.value.bias is not None and bias is not None:
                    group.value.bias.copy_(bias[mine])
            if hasattr(group, "reset_parameters"):
                group.reset_parameters()  # type: ignore[operator]

    def outputs(self, calls: Sequence[AttentionCall]) -> Tensor:
        """The outputs of all heads side by side (b t h*e), from the calls of the groups' ops."""
        made = [attended(group, own).flatten(2) for group, own in zip(self.own_groups(), calls, strict=True)]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def draw_keep(self, rate: float, b: int, t: int, s: int, like: Tensor) -> Tensor | None:
        """A dropout mask of the code; None if nothing is dropped."""
        if not self.training or rate == 0.0:
            return None
        shape = b, sum(size.heads for size in self.sizes), t, s
        return drawn_keep(shape, rate, device=like.device, dtype=at_least_float32(like.dtype))

    def tensors(
        self,
        rows: list[Rows],
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None = None,
        memory: LayerCache | None = None,
    ) -> list[dict[str, Tensor]]:
        """The tensors for the op of each group: `rows` (q, k, v) and, for relational heads, symbols in place of v,
        q_rel and k_rel.

        `real` (b s) is True at keys that are not padding.  `memory` is the cache of self-attention, where `keys` are x,
        or of cross-attention, whose keys are computed in the first call.
        """
        own, past = keys is x, 0 if memory is None else memory.length
        symbols = self._symbols(values, real, memory, own)
        parts: list[dict[str, Tensor]] = []
        for i, (group, made) in enumerate(zip(self.own_groups(), rows, strict=True)):
            source = self.source_of[i]
            if source is not None:
                f = asked(group, "features")(x)
                made = made | asked(group, "receive")(f)
                if own or past == 0:
                    made |= asked(group, "send")(f if own else asked(group, "features")(keys))
                given = symbols[source]
                if given is not None:
                    read = asked(group, "values")(given)
                    t, s = x.shape[1], keys.shape[1] + (past if own else 0)
                    table = read.ndim == 3
                    made["v"] = by_offset(read, t, s, past) if table else read.expand(x.shape[0], -1, -1, -1)
            if memory is not None:
                made |= _held(memory, i, made, None if own else keys.shape[1])
            if self.shared[i]:
                made |= {name: parts[-1][name] for name in "qk"}
            parts.append(made)
        return parts

    def _symbols(
        self, values: Tensor, real: Tensor | None, memory: LayerCache | None, own: bool
    ) -> list[Tensor | None]:
        """The symbols of the new keys by source, or tables by offset; None for keys that a cache holds."""
        sources: list[SymbolModule] = list(self.symbols)  # type: ignore[arg-type]
        if memory is None or own:
            first = 0 if memory is None else memory.length
            return [source(values, mask=real, first=first, cache=memory) for source in sources]
        wanted = [memory.length == 0 or isinstance(source, RelativeSymbols) for source in sources]
        return [source(values, mask=real) if new else None for source, new in zip(sources, wanted, strict=True)]


def _held(memory: LayerCache, i: int, made: dict[str, Tensor], s: int | None) -> dict[str, Tensor]:
    """What the keys of group `i` give, with those of a cache; a table by offset is not cached.

    `s`: number of keys of cross-attention.  Raises ValueError if its cache has another number.
    """
    new: dict[str, Tensor] = {name: made[name] for name in ("k", "v", "k_rel") if name in made and made[name].ndim == 4}
    if s is None:
        return {name: memory.extend((i, name), x) for name, x in new.items()}
    held = memory.once(i, lambda: new)
    if any(x.shape[1] != s for x in held.values()):
        had = next(x.shape[1] for x in held.values() if x.shape[1] != s)
        raise ValueError(f"MultiheadAttention: {had} keys as in its cache were wanted but {s} came")
    return held


def plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and no `forward` of its own (as accelerate sets it), which a replacement loses."""
    return "forward" not in vars(module) and not any(x for name, x in vars(module).items() if name.endswith("_hooks"))


def added(who: str, groups: Sequence[nn.Module], bias: Tensor | None) -> Tensor | None:
    """An added mask as these heads read it.

    Compiled code cannot read its numbers: there those that hide nothing from heads without a softmax over keys become
    -inf.  Otherwise raises ValueError for them.
    """
    if bias is None or not bias.numel():
        return bias
    for group in groups:
        normalise = getattr(compiled(group), "normalise", None)
        if normalise not in NORMALISE or SOFTMAX_AXIS.get(normalise) == "s" or is_own(group):
            continue
        if unread(bias):
            return bias.masked_fill(bias <= LOW, -torch.inf)
        low = bias.masked_fill(bias == -torch.inf, 0).amin().item()  # -inf hides: -1e9 is rounded to it in float16
        if low <= LOW:
            kind = type(compiled(group)).__name__
            raise ValueError(f"{who}: -inf or a Boolean mask hides pairs from {kind} but a mask with {low:g} came")
    return bias
