"""Multi-head attention over any list of head groups, side by side.

    y = W_out [group_1(q, k, v) | group_2(q, k, v) | ...],    [q | k | v] = W_qkv x

One matrix multiply makes all queries, keys and values (two in cross-attention), one makes the output.  The rows of
`qkv` are [queries of all groups | keys of all groups | values of all groups], head after head.  The values of
relational groups are symbols, which the layer's own sources make or the caller gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.layers import Device
from polyhead.layers.arguments import check, heads_of, symbols_of
from polyhead.layers.cache import LayerCache
from polyhead.layers.heads import HeadGroup, RelationalHeads, SymbolGroup, build, shared_groups
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import AlibiBias, RelativePositionBias, rotary_tables
from polyhead.layers.projection import (
    Rows,
    by_offset,
    linear,
    out_weight,
    project,
    value_weights,
    widths_of,
)
from polyhead.layers.symbols import SymbolModule, build_symbols
from polyhead.layers.taps import GroupTaps, Taps, code_of
from polyhead.ops.code import dense
from polyhead.shapes import shaped

Positions = config.Position | nn.ModuleDict | None


@dataclass(frozen=True)
class Call:
    """Who looks at whom in one call: `t` queries of `x` at `s` keys, of `x` and what went before or of a context.

    `past`: tokens of x that `memory` has seen before; `first`: what query 0 is among the keys, for relative symbols.
    """

    x: Tensor
    context: Tensor | None
    memory: LayerCache | None
    past: int
    s: int
    first: int
    positions: Tensor | None
    key_positions: Tensor | None

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


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with any mixture of heads.

    >>> attention = MultiHeadAttention(64, [Softmax(4), Hyla(4)], causal=True)
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    `dim` is the model width; heads that name no width of their own get dim // (all heads).  `positions`: Rotary,
    RelativeBias or Alibi, or rotary tables shared with other layers.  `dropout` is a rate on the latent code, one
    draw per element or, with `dropout_shared`, one mask for the batch and all heads.  `qk_norm`: LayerNorm without
    bias on q and k, per head.  `window`: a query sees only keys less than `window` positions away.
    `own_symbols=False`: relational heads get no source of symbols here, the caller gives them.
    """

    def __init__(
        self,
        dim: int,
        heads: config.Mechanism | Sequence[config.Mechanism],
        *,
        causal: bool = False,
        positions: Positions = None,
        bias: bool = False,
        window: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        dropout_shared: bool = False,
        max_length: int = 512,
        own_symbols: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"MultiHeadAttention: dropout must be in [0, 1) but is {dropout}")
        if window is not None and window < 1:
            raise ValueError(f"MultiHeadAttention: window must be at least 1 but is {window}")
        heads = config.head_list("MultiHeadAttention", heads)
        self.dim, self.causal, self.window, self.max_length = dim, causal, window, max_length
        self.dropout, self.dropout_shared = dropout, dropout_shared
        self.total_heads = sum(group.heads for group in heads)
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        groups = [build(mechanism, dim, self.total_heads, bias=bias, **how) for mechanism in heads]
        self.groups = nn.ModuleList(groups)
        self.sizes = [group.sizes for group in groups]
        self.shared = shared_groups(heads, groups)
        self.widths = widths_of(self.sizes)
        self.qkv = linear(dim, sum(self.widths), bias=bias, **how)
        self.out = nn.Linear(sum(size.heads * size.value_dim for size in self.sizes), dim, bias=bias, **how)
        self._add_positions(positions, heads, max_length, device, dtype)
        # q and k of one group, then of the next; a group that shares them has none to normalise.
        norms = [
            nn.Identity() if shared else LayerNorm(size.dim, eps=1e-6, bias=False, **how)
            for size, shared in zip(self.sizes, self.shared, strict=True)
            for _ in range(2)
        ]
        self.qk_norms = nn.ModuleList(norms) if qk_norm else None
        self.symbol_dims = [group.symbol_dim if isinstance(group, SymbolGroup) else None for group in groups]
        self._add_symbols(heads if own_symbols else (), how)

    def _add_symbols(self, heads: Sequence[config.Mechanism], how: dict[str, Any]) -> None:
        """One source for each that the groups name; `source_of` is which one a group reads."""
        named = [group.symbols for group in heads if isinstance(group, config.SymbolHeads)]
        distinct = list(dict.fromkeys(named))
        self.source_of = [distinct.index(g.symbols) if isinstance(g, config.SymbolHeads) else None for g in heads]
        options = {"causal": self.causal, "max_length": self.max_length, **how}
        self.symbols = nn.ModuleList(build_symbols(source, self.dim, **options) for source in distinct)

    def _add_positions(
        self,
        positions: Positions,
        heads: Sequence[config.Mechanism],
        length: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self.rotary: nn.ModuleDict | None = None
        self.relative: RelativePositionBias | AlibiBias | None = None
        if isinstance(positions, nn.ModuleDict):
            self.rotary = positions
        elif isinstance(positions, config.Rotary):
            theta, layout = positions.theta, positions.layout
            self.rotary = rotary_tables([heads], self.dim, theta=theta, layout=layout, max_length=length, device=device)
        elif isinstance(positions, config.RelativeBias):
            buckets = positions.buckets or length
            distance = positions.max_distance or buckets
            both = positions.bidirectional
            self.relative = RelativePositionBias(
                self.total_heads, buckets, distance, bidirectional=both, device=device, dtype=dtype
            )
        elif isinstance(positions, config.Alibi):
            self.relative = AlibiBias(self.total_heads, device=device)
        elif positions is not None:
            raise ValueError(
                f"MultiHeadAttention: positions must be Rotary(), RelativeBias() or Alibi() but is {positions}"
            )

    @shaped
    def forward(
        self,
        x: Float[Tensor, "b t m"],
        context: Float[Tensor, "b s m"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        keep: Float[Tensor, "..."] | None = None,
        symbols: Tensor | Sequence[Tensor | None] | None = None,
        first: int | None = None,
        cache: LayerCache | None = None,
        return_code: bool = False,
        taps: list[Taps] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y (b t m); with `return_code` also the code of all pairs (b h t s), before dropout.

        `mask` is boolean, True where looking is allowed, and broadcasts to (b h t s).  `bias` adds to the scores:
        (b|1 h|1 t s), or by offset (h, t+s-1).  `positions` are those of x (default 0, 1, ...); a context counts
        from 0.  `keep` (b|1 h|1 t s) multiplies the code in place of the layer's own dropout, in eval mode, too: 0 in
        a head takes that head away.  `symbols`, for all groups or one (or None) for each: (b|1 s symbol width), or by
        clipped offset a table of 2 distance + 1 rows; `first` is what query 0 is among the keys, for the latter
        (default: the last query is the last key if causal, else query 0 is key 0).  With a `cache`, x are tokens that
        follow those it has seen, s counts both, and symbols are those of x.
        """
        call = self._call(x, context, positions, first, cache)
        check((x.shape[0], self.total_heads, call.t, call.s), mask, bias, keep)
        given = self._symbols(symbols, call)
        projected = project(self.qkv, self.sizes, x, context, senders=call.new_senders)
        bias, mask = self._bias(bias, call), self._window(mask, call)
        keep = self._keep(x, call.s) if keep is None else keep
        outputs, codes, seen, head = [], [], [], 0
        made: dict[str, Tensor] = {}
        for i, group in enumerate(self._groups()):
            made = self._inputs(i, projected[i], given[i], call, made)
            last = head + self.sizes[i].heads
            its_bias, its_mask, its_keep = (heads_of(a, head, last) for a in (bias, mask, keep))
            y = group(**made, bias=its_bias, mask=its_mask, causal=self.causal, keep=its_keep)
            outputs.append(y.flatten(2))
            if return_code:
                codes.append(code_of(group, made["q"], made["k"], its_bias, its_mask, self.causal))
            if taps is not None:
                seen.append(self._tap(i, made, y, its_bias, its_mask))
            head = last
        result = self.out(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1))
        if call.memory is not None:
            call.memory.length += call.t
        if taps is not None:
            taps.append(Taps(x=x, context=call.source, output=result, b_out=self.out.bias, groups=tuple(seen)))
        return (result, torch.cat(codes, dim=1)) if return_code else result

    def _groups(self) -> list[HeadGroup]:
        return list(self.groups)  # type: ignore[arg-type]

    def _call(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        first: int | None,
        cache: LayerCache | None,
    ) -> Call:
        who = "MultiHeadAttention"
        if x.shape[-1] != self.dim:
            raise ValueError(f"{who}: m = {self.dim} but x (b t m) = {tuple(x.shape)}")
        if cache is not None and self.causal != (context is None):
            wanted = "be causal" if context is None else "not be causal, to another sequence"
            raise ValueError(f"{who}: attention with a cache must {wanted}")
        memory = cache if cache is None or context is None else cache.cross
        past = 0 if memory is None else memory.length
        s = past + x.shape[1] if context is None else context.shape[1]
        keys = positions if context is None else None
        if memory is not None and context is None:
            if past and ("positions" in memory) != (positions is not None):
                raise ValueError(f"{who}: with a cache, positions must be given in every call or in none")
            keys = None if positions is None else memory.extend("positions", positions)
        first = (s - x.shape[1] if self.causal else past) if first is None else first
        return Call(x, context, memory, past, s, first, positions, keys)

    def _symbols(self, symbols: Tensor | Sequence[Tensor | None] | None, call: Call) -> Sequence[Tensor | None]:
        """The symbols of the senders that are new, for each group."""
        if all(dim is None for dim in self.symbol_dims) or not call.new_senders:
            return [None] * len(self.groups)
        if symbols is not None:
            return symbols_of(symbols, self.symbol_dims, call.x.shape[0], call.source.shape[1])
        if not self.symbols:
            raise ValueError("MultiHeadAttention: with own_symbols=False its relational heads need symbols=")
        own = call.context is None
        sources: list[SymbolModule] = list(self.symbols)  # type: ignore[arg-type]
        first, cache = (call.past, call.memory) if own else (0, None)
        made = [source(call.source, first=first, cache=cache) for source in sources]
        return [None if which is None else made[which] for which in self.source_of]

    def _inputs(
        self, i: int, rows: Rows, symbols: Tensor | None, call: Call, before: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What the op of group `i` reads: q of the receivers, k and v of all senders, for relations q_rel and k_rel."""
        group = self._groups()[i]
        f = group.features(call.x) if isinstance(group, SymbolGroup) else None
        made = {name: rows[name] for name in ("q",) if name in rows}
        if isinstance(group, SymbolGroup) and f is not None:
            made |= group.receive(f)
        if "q" in made:
            made["q"] = self._place(2 * i, made["q"], call, call.positions)

        def senders() -> dict[str, Tensor]:
            return self._senders(i, rows, f, symbols, call)

        if call.memory is None:
            made |= senders()
        elif call.context is not None:
            made |= call.memory.once(i, senders)
        else:
            made |= {
                name: new if name == "table" else call.memory.extend((i, name), new) for name, new in senders().items()
            }
        if self.shared[i]:
            made |= {name: before[name] for name in "qk"}
        if "table" in made:
            made["v"] = by_offset(made.pop("table"), call.t, call.s, call.first)
        elif made["v"].shape[0] == 1:
            made["v"] = made["v"].expand(call.x.shape[0], -1, -1, -1)
        return made

    def _senders(self, i: int, rows: Rows, f: Tensor | None, symbols: Tensor | None, call: Call) -> dict[str, Tensor]:
        """k (b s g d), v (b|1 s g e) or the table of relative symbols, k_rel: of the senders that are new."""
        group = self._groups()[i]
        made = {name: rows[name] for name in "kv" if name in rows}
        if isinstance(group, SymbolGroup) and f is not None and symbols is not None:
            made |= group.send(f if call.context is None else group.features(call.source))
            made["v" if symbols.ndim == 3 else "table"] = group.values(symbols)
        if "k" in made:
            made["k"] = self._place(2 * i + 1, made["k"], call, call.positions if call.context is None else None)
        return made

    def _place(self, which: int, rows: Tensor, call: Call, positions: Tensor | None) -> Tensor:
        """Normalise and rotate the queries (`which` even) or keys (odd) of group `which` // 2."""
        if self.qk_norms is not None:
            rows = self.qk_norms[which](rows)
        if self.rotary is None:
            return rows
        reach = max(call.past + call.t, call.s)
        if call.positions is None and reach > self.max_length:
            raise ValueError(f"MultiHeadAttention: {reach} positions but max_length is {self.max_length}")
        # Positions counted here are in range by the test above; reading them would wait for the device.
        start = call.past if which % 2 == 0 or call.context is None else 0
        counted = torch.arange(start, start + rows.shape[1], device=rows.device)[None]
        where = counted if positions is None else positions
        return self.rotary[str(rows.shape[-1])](rows, where[..., None], check=positions is not None)

    def _bias(self, bias: Tensor | None, call: Call) -> Tensor | None:
        """The sum of the given bias and the position bias; by offset (h, t+s-1) unless one of them is dense."""
        if self.relative is None:
            return bias
        x, t, s = call.x, call.t, call.s
        if isinstance(self.relative, AlibiBias):
            self.relative.slopes(x)  # it has no parameter that a state dict could bring from the meta device
        if call.positions is None:
            relative = self.relative(t, s, offset=s - t if self.causal else call.past).to(x.dtype)
        else:
            relative = self.relative.dense(call.positions, self._key_positions(call)).to(x.dtype)
        if bias is None:
            return relative
        if bias.ndim != relative.ndim:
            bias, relative = (dense(a, t, s) for a in (bias, relative))
        return bias + relative

    def _key_positions(self, call: Call) -> Tensor:
        return torch.arange(call.s, device=call.x.device)[None] if call.key_positions is None else call.key_positions

    def _window(self, mask: Tensor | None, call: Call) -> Tensor | None:
        """`mask` without the keys that are `window` positions away or more."""
        if self.window is None:
            return mask
        t, start = call.t, call.s - call.t if self.causal else call.past
        queries = torch.arange(start, start + t, device=call.x.device)[None]
        queries = queries if call.positions is None else call.positions
        near = (queries[:, None, :, None] - self._key_positions(call)[:, None, None, :]).abs() < self.window
        return near if mask is None else mask & near

    def _keep(self, x: Tensor, s: int) -> Tensor | None:
        if not self.training or self.dropout == 0.0:
            return None
        return self.draw_keep(x.shape[0], x.shape[1], s, device=x.device, dtype=x.dtype)

    def draw_keep(
        self,
        b: int,
        t: int,
        s: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "_ _ {t} {s}"]:
        """One draw of this layer's dropout, the `keep` of `forward`: 0 or 1 / (1 - rate)."""
        shape = (1, 1, t, s) if self.dropout_shared else (b, self.total_heads, t, s)
        draw = torch.rand(shape, generator=generator, device=device)
        return (draw >= self.dropout).to(dtype or draw.dtype) / (1.0 - self.dropout)

    def _tap(
        self, i: int, made: dict[str, Tensor], output: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> GroupTaps:
        group = self._groups()[i]
        w_value, b_value = value_weights(self.qkv, self.sizes, i)
        return GroupTaps(
            kind=group.kind,
            normalise=group.normalise,
            act=group.act,
            depth=group.depth,
            output=output,
            bias=bias,
            mask=mask,
            causal=self.causal,
            scale=self.sizes[i].dim ** -0.5,
            w_value=w_value,
            b_value=b_value,
            w_out=out_weight(self.out, self.sizes, i),
            value_weight=group.value_weight,
            relation_act=group.relation_act if isinstance(group, SymbolGroup) else None,
            relation_weight=group.relation_weight if isinstance(group, RelationalHeads) else None,
            **made,
        )
