"""Multi-head attention over any list of head groups, side by side.

    y = W_out [group_1(q, k, v) | group_2(q, k, v) | ...],    [q | k | v] = W_qkv x

One matrix product computes all queries, keys and values (two in cross-attention); one computes the output.  The rows of
`qkv` are [queries of all groups | keys of all groups | values of all groups], head by head.  The values of relational
groups are symbols; they come from the layer's own sources or from the caller.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.config.mechanisms import check_shared
from polyhead.layers.cache import LayerCache, whole
from polyhead.layers.call import LayerCall, LayerLimits, call_of, check, drawn_keep, no_script, symbols_of
from polyhead.layers.device import Device
from polyhead.layers.heads.functions import asked, attended, coder, compiled
from polyhead.layers.heads.groups import LinearHeads, SymbolGroup, build, sums
from polyhead.layers.norms import LayerNorm
from polyhead.layers.own import OwnPositions
from polyhead.layers.positions import AlibiBias, RelativePositionBias, build_bias, leave_meta, rotary_tables
from polyhead.layers.projection import Rows, affine, by_offset, linear, out_weight, project, value_weights, widths_of
from polyhead.layers.symbols import SymbolModule, build_symbols
from polyhead.layers.taps import GroupTaps, Taps, tapped
from polyhead.ops.call import AttentionCall, Packed
from polyhead.ops.latent_code import allowed, at_least_float32, dense
from polyhead.spec.shapes import check_layer, check_rate, check_window, shaped

Positions = config.Position | nn.ModuleDict | None
Part = tuple[AttentionCall | None, Tensor]
"""For one group: the call of its op (None if it updated a state instead), and its output (b t h*e)."""


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with any mixture of heads.

    >>> attention = MultiHeadAttention(64, [Softmax(4), Hyla(4)], causal=True)
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> y, code = attention(torch.randn(2, 10, 64), return_code=True)      # the latent code of all pairs (b h t s)

    `dim` is the model width; heads without a given width get dim // (number of all heads).  `positions`: Rotary,
    RelativeBias or Alibi, or rotary tables that layers share.  `dropout` is a rate on the latent code; it draws one
    mask per sample and head or, with `dropout_shared`, one for the batch and all heads.  `qk_norm`: LayerNorm without
    bias on q and k, per head.  `window`: a query attends only to keys less than `window` positions away.
    `own_symbols=False`: the layer has no sources of symbols; the caller passes symbols for relational heads.
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
        check_layer("MultiHeadAttention", dim, causal)
        check_rate("MultiHeadAttention", dropout)
        heads = config.head_list("MultiHeadAttention", heads)
        self.dim, self.causal, self.max_length = dim, causal, max_length
        self.window = check_window("MultiHeadAttention", window)
        self.dropout, self.dropout_shared = dropout, dropout_shared
        self.total_heads = sum(group.heads for group in heads)
        groups = [
            build(m, dim, self.total_heads, bias=bias, max_length=max_length, device=device, dtype=dtype) for m in heads
        ]
        self.groups = nn.ModuleList(groups)
        self.sizes = [group.sizes for group in groups]
        check_shared("MultiHeadAttention", heads, self.sizes)
        self.shared = [mechanism.share for mechanism in heads]
        self.widths = widths_of(self.sizes)
        self.heads_of = list(pairwise((0, *accumulate(size.heads for size in self.sizes))))
        self.qkv = linear(dim, sum(self.widths), bias=bias, device=device, dtype=dtype)
        values = sum(size.heads * size.value_dim for size in self.sizes)
        self.out = nn.Linear(values, dim, bias=bias, device=device, dtype=dtype)
        self._add_positions(positions, heads, max_length, device, dtype)
        # Norms of q and k, group by group; a group that shares its queries and keys has none.
        norms = [
            nn.Identity() if shared else LayerNorm(size.dim, eps=1e-6, bias=False, device=device, dtype=dtype)
            for size, shared in zip(self.sizes, self.shared, strict=True)
            for _ in range(2)
        ]
        self.qk_norms = nn.ModuleList(norms) if qk_norm else None
        self.symbol_dims = [group.symbol_dim if isinstance(group, SymbolGroup) else None for group in groups]
        self._add_symbols(heads if own_symbols else (), device, dtype)
        self.register_load_state_dict_post_hook(leave_meta)

    __prepare_scriptable__ = no_script

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.total_heads}, causal={self.causal}"

    def _add_symbols(self, heads: Sequence[config.Mechanism], device: Device, dtype: torch.dtype | None) -> None:
        """Build each distinct source of symbols once; `source_of` gives the index of each group's source."""
        distinct = list(dict.fromkeys(group.symbols for group in heads if isinstance(group, config.SymbolHeads)))
        self.source_of = [distinct.index(g.symbols) if isinstance(g, config.SymbolHeads) else None for g in heads]
        causal, length = self.causal, self.max_length
        self.symbols = nn.ModuleList(
            build_symbols(s, self.dim, causal=causal, max_length=length, place=i, device=device, dtype=dtype)
            for i, s in enumerate(distinct)
        )

    def _add_positions(
        self,
        positions: Positions,
        heads: Sequence[config.Mechanism],
        length: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self.rotary: nn.ModuleDict | OwnPositions | None = None
        self.relative: RelativePositionBias | AlibiBias | OwnPositions | None = None
        if isinstance(positions, nn.ModuleDict):
            self.rotary = positions
        elif isinstance(positions, config.Rotary):
            theta, layout = positions.theta, positions.layout
            self.rotary = rotary_tables([heads], self.dim, theta=theta, layout=layout, max_length=length, device=device)
        elif positions is not None:
            made = build_bias(positions, self.total_heads, self.dim, length, device=device, dtype=dtype)
            if isinstance(made, OwnPositions) and made.way == "rotate":
                self.rotary = made
            else:
                self.relative = made

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
        cu_seqlens: Packed | None = None,
        cache: LayerCache | None = None,
        return_code: bool = False,
        taps: list[Taps] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y (b t m); with `return_code` also the code of all pairs (b h t s), before dropout.

        `mask` is boolean, True where a query may attend to a key, and broadcasts to (b h t s).  `bias` is added to the
        scores: (b|1 h|1 t s), or by offset (h, t+s-1).  `positions` are those of x, a context's are 0, 1, ...  By
        default x's are 0, 1, ... too or, if causal with a context, such that the last query is the last key.  `keep`
        (b|1 h|1 t s) multiplies the code in place of the layer's own dropout, also in eval mode; 0 throughout a head
        removes that head.  `symbols` is one tensor for all groups or one (or None) per group: (b|1 s symbol width), or
        a table of 2 distance + 1 rows by clipped offset.  For a table, `first` is the index of query 0 among the keys
        (default: the last query is the last key if causal, else query 0 is key 0).
        `cu_seqlens` (int32, n + 1): x (1 t m) is n packed sequences, masked from one another; sequence i has the rows
        cu_seqlens[i] to cu_seqlens[i + 1], and its positions start at 0.  With a `cache`, x follows the tokens in the
        cache, and s counts both; with a `window`, s counts only the tokens that the cache still holds.  Raises
        ValueError for shapes, dtypes or combinations of arguments that do not match.
        """
        with whole(cache):
            call = call_of(
                x, context, dim=self.dim, causal=self.causal, positions=positions, first=first, window=self.window,
                cu_seqlens=cu_seqlens, cache=cache, layer=self,
            )  # fmt: skip
            check((x.shape[0], self.total_heads, call.t, call.gone + call.s), mask, bias, keep)
            mask, bias, keep = (call.held(array) for array in (mask, bias, keep))
            bias, keep = self._bias(bias, call), self._keep(x, call.s) if keep is None else keep
            limits = self._limits(bias, mask, keep, call)
            plain = bias is None and mask is None and keep is None and not return_code and taps is None
            parts = self._parts(self._symbols(symbols, call), limits, call, plain)
            result = self.out(parts[0][1] if len(parts) == 1 else torch.cat([y for _, y in parts], dim=-1))
            if call.memory is not None:
                call.memory.advance(call.t, call.span)
            if taps is not None:
                seen = tuple(self._tap(i, own, y) for i, (own, y) in enumerate(parts) if own is not None)
                taps.append(Taps(x=x, context=call.source, output=result, b_out=affine(self.out)[1], groups=seen))
            return (result, self._code(parts)) if return_code else result

    def _parts(self, symbols: Sequence[Tensor | None], limits: LayerLimits, call: LayerCall, plain: bool) -> list[Part]:
        """The call and the output of each group."""
        projected = project(self.qkv, self.sizes, call.x, call.context, senders=call.new_senders)
        parts: list[Part] = []
        made: dict[str, Tensor] = {}
        for i, group in enumerate(self.groups):
            if self._sums(i, call, plain):
                made = {}
                parts.append((None, self._step(i, projected[i], call).flatten(2)))
            else:
                made = self._inputs(i, projected[i], symbols[i], call, made)
                own = limits.call(made, *self.heads_of[i])
                parts.append((own, attended(group, own).flatten(2)))
        return parts

    def _symbols(self, symbols: Tensor | Sequence[Tensor | None] | None, call: LayerCall) -> Sequence[Tensor | None]:
        """The symbols of the new senders, for each group."""
        if all(dim is None for dim in self.symbol_dims) or not call.new_senders:
            return [None] * len(self.groups)
        if symbols is not None:
            return symbols_of(symbols, self.symbol_dims, call)
        if not self.symbols:
            raise ValueError("MultiHeadAttention: with own_symbols=False its relational heads need symbols=")
        own = call.context is None
        sources: list[SymbolModule] = list(self.symbols)  # type: ignore[arg-type]
        first, cache, where = (call.past, call.memory, call.positions) if own else (0, None, None)
        made = [
            source(call.source, first=first, cache=cache, cu_seqlens=call.cu_seqlens, positions=where)
            for source in sources
        ]
        return [None if which is None else made[which] for which in self.source_of]

    def _inputs(
        self, i: int, rows: Rows, symbols: Tensor | None, call: LayerCall, before: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The tensors for the op of group `i`: q and q_rel of the receivers; k, k_rel and v of all senders."""
        f = None if self.symbol_dims[i] is None else asked(self.groups[i], "features")(call.x)
        made = self._receivers(i, rows, f, call)
        like = next(iter(made.values()), call.x).dtype
        made |= self._all_senders(i, rows, f, symbols, call, like)
        if self.shared[i]:
            made |= {"q": before["q"], "k": before["k"]}
        if "table" in made:
            table = made.pop("table")
            made["v"] = table[None, :0] if call.empty else by_offset(table, call.t, call.s, call.first)
        if made["v"].ndim == 4 and made["v"].shape[0] == 1:
            made["v"] = made["v"].expand(call.x.shape[0], -1, -1, -1)
        return made

    def _receivers(self, i: int, rows: Rows, f: Tensor | None, call: LayerCall) -> dict[str, Tensor]:
        """q (b t h d) and, for relations, q_rel."""
        made = {"q": rows["q"]} if "q" in rows else {}
        made |= {} if f is None else asked(self.groups[i], "receive")(f)
        if "q" in made:
            made["q"] = self._place(2 * i, made["q"], call, call.positions)
        return made

    def _all_senders(
        self, i: int, rows: Rows, f: Tensor | None, symbols: Tensor | None, call: LayerCall, like: torch.dtype
    ) -> dict[str, Tensor]:
        """`_senders` together with the cached tensors of earlier calls; those of a context in at least the dtype
        `like`."""
        if call.memory is None:
            return self._senders(i, rows, f, symbols, call)
        if call.context is None:
            new = self._senders(i, rows, f, symbols, call)
            return {name: x if name == "table" else call.remember((i, name), x) for name, x in new.items()}
        kept = call.memory.once(i, lambda: self._senders(i, rows, f, symbols, call))
        # They may have been cached under autocast and be read without it.
        return {name: x.to(torch.promote_types(x.dtype, like)) for name, x in kept.items()}

    def _senders(
        self, i: int, rows: Rows, f: Tensor | None, symbols: Tensor | None, call: LayerCall
    ) -> dict[str, Tensor]:
        """k (b s g d), v (b|1 s g e) or the table of relative symbols, and k_rel, for the new senders."""
        group = self.groups[i]
        made = {name: rows[name] for name in "kv" if name in rows}
        if f is not None and symbols is not None:
            made |= asked(group, "send")(f if call.context is None else asked(group, "features")(call.source))
            made["v" if symbols.ndim == 3 else "table"] = asked(group, "values")(symbols)
        if "k" in made:
            made["k"] = self._place(2 * i + 1, made["k"], call, call.positions if call.context is None else None)
        return made

    def _place(self, which: int, rows: Tensor, call: LayerCall, positions: Tensor | None) -> Tensor:
        """Normalise and rotate the queries (`which` even) or keys (odd) of group `which` // 2."""
        if self.qk_norms is not None:
            rows = self.qk_norms[which](rows)
        if self.rotary is None:
            return rows
        where = call.counted(queries=which % 2 == 0) if positions is None else positions
        if isinstance(self.rotary, OwnPositions):
            return self.rotary.rotate(rows, where)
        reach = max(call.past + call.t, call.s) if call.positions is None else call.s  # given ones are those of x only
        beyond = positions is None and reach > self.max_length
        if beyond and call.cu_seqlens is None:
            raise ValueError(f"MultiHeadAttention: {reach} positions but max_length is {self.max_length}")
        # The test above proves that counted positions are in range; reading them would synchronise the device.  Those
        # of packed sequences can be out of range only if `beyond`; on a GPU the table lookup itself then fails.
        packed = beyond and call.x.device.type == "cpu"
        table = self.rotary[str(self.sizes[which // 2].dim)]
        return table(rows, where[..., None], check=positions is not None or packed)

    def _bias(self, bias: Tensor | None, call: LayerCall) -> Tensor | None:
        """The sum of the given bias and the position bias; by offset (h, t+s-1) unless one of them is dense."""
        if self.relative is None or call.empty:
            return bias
        x, t, s = call.x, call.t, call.s
        if not isinstance(self.relative, RelativePositionBias):
            self.relative.leave_meta(x)
        if call.positions is None:
            relative = self.relative(t, s, offset=s - t if self.causal else call.past)
        else:
            relative = self.relative.dense(call.positions, call.where_keys_are())
        relative = relative.to(at_least_float32(x.dtype))  # bfloat16 cannot hold a distance of 257
        if bias is None:
            return relative
        if bias.ndim != relative.ndim:
            bias, relative = (dense(a, t, s) for a in (bias, relative))
        return bias + relative

    def _limits(self, bias: Tensor | None, mask: Tensor | None, keep: Tensor | None, call: LayerCall) -> LayerLimits:
        """Masks and biases for the ops.  Their window counts indices: with other positions it goes into the mask."""
        window = self.window
        if call.memory is not None and call.memory.real is not None and call.context is None:
            real = call.memory.real[:, None, None]
            mask = real if mask is None else mask & real
        aligned = self.causal or call.context is None or (call.t == call.s and call.past == 0)
        if window is not None and not (call.positions is None and aligned):
            queries = call.counted(queries=True) if call.positions is None else call.positions
            near = (queries[:, None, :, None] - call.where_keys_are()[:, None, None, :]).abs() < window
            mask, window = near if mask is None else mask & near, None
        return LayerLimits(bias, mask, keep, self.causal, window, call.cu_seqlens)

    def _sums(self, i: int, call: LayerCall, plain: bool) -> bool:
        """Whether group `i` caches the sum over all keys and values instead of each of them.

        The first call with a cache decides.  `plain`: the call has no bias, mask, keep, return_code or taps.
        """
        group, memory = compiled(self.groups[i]), call.memory
        if memory is None or call.context is not None:
            return False
        if not isinstance(group, LinearHeads):
            if (i, "state") in memory:
                who = type(group).__name__
                raise ValueError(f"MultiHeadAttention: linear heads kept the sum of earlier tokens, but a {who} came")
            return False
        shares = self.shared[i] or any(self.shared[i + 1 : i + 2])
        if call.past == 0:
            return plain and sums(self.groups[i]) and not shares and self.window is None
        if (i, "state") in memory and not plain:
            raise ValueError(
                "MultiHeadAttention: linear heads keep the sum of earlier tokens, not each of them, so bias, mask, "
                "keep, return_code and taps must be given in the first call with a cache or in none"
            )
        return (i, "state") in memory

    def _step(self, i: int, rows: Rows, call: LayerCall) -> Tensor:
        """The output of group `i` for new tokens; their keys and values are added to its state."""
        group, memory = compiled(self.groups[i]), call.memory
        assert isinstance(group, LinearHeads)
        assert memory is not None
        q, k = (self._place(2 * i + n, rows[name], call, call.positions) for n, name in enumerate("qk"))
        mask = None if memory.real is None else memory.real[:, None, None, memory.real.shape[1] - call.t :]
        y, state = group.step(q, k, rows["v"], memory.state((i, "state")), mask=mask)
        if call.past + call.t:  # the first call with tokens decides, see `_sums`
            memory.put((i, "state"), state)
        return y

    def _keep(self, x: Tensor, s: int) -> Tensor | None:
        if not self.training or self.dropout == 0.0:
            return None
        return self.draw_keep(x.shape[0], x.shape[1], s, device=x.device, dtype=at_least_float32(x.dtype))

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
        """Draw a dropout mask of this layer, the `keep` of `forward`: entries are 0 or 1 / (1 - rate)."""
        shape = (1, 1, t, s) if self.dropout_shared else (b, self.total_heads, t, s)
        return drawn_keep(shape, self.dropout, device=device, dtype=dtype, generator=generator)

    def _code(self, parts: list[Part]) -> Tensor:
        """The code of all pairs (b h t s), recomputed from the call of each group."""
        calls = zip(self.groups, parts, strict=True)
        return torch.cat([coder(group)(own) for group, (own, _) in calls if own is not None], dim=1)

    def _tap(self, i: int, own: AttentionCall, y: Tensor) -> GroupTaps:
        w_value, b_value = value_weights(self.qkv, self.sizes, i)
        return tapped(
            self.groups[i],
            own,
            y.unflatten(-1, (self.sizes[i].heads, -1)),
            mask=allowed(replace(own, causal=False)),
            causal=self.causal,
            scale=self.sizes[i].dim ** -0.5,
            w_value=w_value,
            b_value=b_value,
            w_out=out_weight(self.out, self.sizes, i),
        )
