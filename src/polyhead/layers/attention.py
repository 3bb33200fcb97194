"""Multi-head attention over any list of head groups, side by side.

    y = W_out [group_1(q, k, v) | group_2(q, k, v) | ...],    [q | k | v] = W_qkv x

One matrix product computes all queries, keys and values (two in cross-attention); one computes the output.  The values
of relational groups are symbols; they come from the layer's own sources or from the caller.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.layers.cache import LayerCache, whole
from polyhead.layers.call import LayerCall, LayerLimits, call_of, check_pairs, drawn_keep, no_script, symbols_of_groups
from polyhead.layers.device import Device, Placement
from polyhead.layers.heads.functions import HeadGroup, attended, coder, compiled
from polyhead.layers.heads.groups import LinearHeads, build, sums
from polyhead.layers.heads.sizes import check_shared
from polyhead.layers.heads.symbolic import symbol_group
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import AlibiBias, RelativePositionBias, build_bias, leave_meta, rotary_tables
from polyhead.layers.projection import (
    Rows,
    affine,
    by_offset,
    linear,
    out_weight,
    output_width,
    project,
    value_weights,
    widths_of,
)
from polyhead.layers.symbols import RelativeSymbols, build_symbols
from polyhead.layers.taps import GroupTaps, Taps, tapped
from polyhead.ops.call import AttentionCall, Masks, Packed, both
from polyhead.ops.latent_code import at_least_float32, dense
from polyhead.spec.shapes import check_count, check_rate, check_window, shaped

Positions = config.Position | nn.ModuleDict | None


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with any mixture of heads.

    >>> attention = MultiHeadAttention(64, [Softmax(4), Hyla(4)], causal=True)
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> y, code = attention(torch.randn(2, 10, 64), return_code=True)      # the latent code of all pairs (b h t s)

    Args:
        dim: The model width; heads without a given width get dim // (number of all heads).
        positions: Rotary, RelativeBias or Alibi, or rotary tables that layers share.
        window: A query attends only to keys less than `window` positions away.
        qk_norm: Whether a LayerNorm without bias acts on q and on k, per head.
        dropout: A rate on the latent code, with one mask per sample and head.
        dropout_shared: Whether dropout draws one mask for the batch and all heads instead.
        own_symbols: Whether the layer has sources of symbols; otherwise the caller passes symbols for relational heads.
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
        check_count("MultiHeadAttention", "dim", dim)
        check_count("MultiHeadAttention", "max_length", max_length)
        for name, value in {"causal": causal, "bias": bias, "qk_norm": qk_norm}.items():
            if not isinstance(value, bool):  # "no" would count as True
                raise ValueError(f"MultiHeadAttention: {name} must be True or False but is {value!r}")
        check_rate("MultiHeadAttention", dropout)
        placement = Placement(device=device, dtype=dtype)
        heads = config.head_list("MultiHeadAttention", heads)
        self.dim, self.causal, self.max_length = dim, causal, max_length
        self.window = check_window("MultiHeadAttention", window)
        self.dropout, self.dropout_shared = dropout, dropout_shared

        # The groups of heads.  `sizes`, `shared`, `heads_of` and `symbol_dims` have an entry for each, and so has
        # `source_of` if the layer has symbols of its own.
        self.total_heads = config.total_heads(heads)
        groups: list[HeadGroup] = []
        self.heads_of: list[tuple[int, int]] = []  # the first head of each group, and the first of the next group
        first = 0
        for mechanism in heads:
            group = build(mechanism, dim, self.total_heads, bias=bias, max_length=max_length, **placement)
            groups.append(group)
            self.heads_of.append((first, first + group.sizes.heads))
            first += group.sizes.heads
        self.groups = nn.ModuleList(groups)
        self.sizes = [group.sizes for group in groups]
        check_shared("MultiHeadAttention", heads, self.sizes)
        self.reads_all_queries = any(mechanism.reads_all_queries for mechanism in heads)
        if self.reads_all_queries and (causal or window is not None):
            raise ValueError("MultiHeadAttention: network='sequence' reads all queries: give no causal and no window")
        self.shared = [mechanism.share for mechanism in heads]  # reads the queries and keys of the group before

        self.widths = widths_of(self.sizes)
        self._build_maps(bias, placement)
        self._build_positions(positions, heads, placement)

        # Gates of outputs, by the index of their group.
        gates = nn.ModuleDict()
        for i, (mechanism, size) in enumerate(zip(heads, self.sizes, strict=True)):
            if isinstance(mechanism, config.Softmax) and mechanism.gate:
                gates[str(i)] = nn.Linear(dim, size.heads * size.value_dim, bias=bias, **placement)
        self.gates = gates or None

        # Norms of queries and of keys, group by group; a group that shares its queries and keys has none.
        self.qk_norms: nn.ModuleList | None = None
        if qk_norm:
            self.qk_norms = nn.ModuleList()
            for size, is_shared in zip(self.sizes, self.shared, strict=True):
                for _ in ("queries", "keys"):
                    norm: nn.Module = nn.Identity()
                    if not is_shared:
                        norm = LayerNorm(size.dim, eps=1e-6, bias=False, **placement)
                    self.qk_norms.append(norm)

        self.symbol_dims: list[int | None] = [getattr(group, "symbol_dim", None) for group in groups]
        self._build_symbols(heads if own_symbols else (), placement)
        self.register_load_state_dict_post_hook(leave_meta)

    __prepare_scriptable__ = no_script

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.total_heads}, causal={self.causal}"

    def _build_maps(self, bias: bool, placement: Placement) -> None:
        """One map to all queries, keys and values, and one from the heads' outputs."""
        self.qkv = linear(self.dim, sum(self.widths), bias=bias, **placement)
        self.out = nn.Linear(output_width(self.sizes), self.dim, bias=bias, **placement)

    def _build_positions(self, positions: Positions, heads: Sequence[config.Mechanism], placement: Placement) -> None:
        """Positions rotate queries and keys (`rotary`) or add a bias to the scores (`relative`)."""
        self.rotary: nn.ModuleDict | None = None
        self.relative: RelativePositionBias | AlibiBias | None = None
        if isinstance(positions, nn.ModuleDict):
            self.rotary = positions
            widths = {str(size.dim) for size in self.sizes}
            if not widths <= positions.keys():
                raise ValueError(f"MultiHeadAttention: heads of widths {widths} need rotary tables, got {[*positions]}")
        elif isinstance(positions, config.Rotary):
            self.rotary = rotary_tables(positions, [heads], self.dim, self.max_length, placement.get("device"))
        elif positions is not None:
            self.relative = build_bias(positions, self.total_heads, self.max_length, **placement)

    def _build_symbols(self, heads: Sequence[config.Mechanism], placement: Placement) -> None:
        """Build each distinct source of symbols once; `source_of` gives the index of each group's source."""
        self.symbols = nn.ModuleList()
        self.source_of: list[int | None] = []
        distinct: list[config.SymbolSource] = []
        for mechanism in heads:
            if not isinstance(mechanism, config.SymbolHeads):
                self.source_of.append(None)
                continue
            source = mechanism.symbols
            if source not in distinct:
                length, index = self.max_length, len(distinct)
                self.symbols.append(
                    build_symbols(source, self.dim, causal=self.causal, max_length=length, cache_key=index, **placement)
                )
                distinct.append(source)
            self.source_of.append(distinct.index(source))

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

        With a `cache`, x follows the tokens in the cache, and s counts both.  If the layer has a window, too, the
        returned code has only the keys that the cache still holds.

        Args:
            mask: Boolean (b h t s) or broadcast to that, True where a query may attend to a key.  A mask of pairs with
                t = 1 is best (t s), as `RelationalSymbols` take (b|1, 1, 1, s) for padding.
            bias: Added to the scores: (b|1 h|1 t s), or by offset (h, t+s-1).
            positions: Those of x, by default from 0; a context's are 0, 1, ....  If causal with a context, x ends by
                default at the position of the context's last token.  With a `cache` and a window, positions must
                increase from token to token (padding: `Cache.expect`).
            keep: Multiplies the code (b|1 h|1 t s) in place of the layer's own dropout, also in eval mode.  With 0
                throughout a head, `keep` removes that head.
            symbols: One tensor for all groups or one (or None) per group: (b|1 s symbol width), or a table by clipped
                offset.  A table has 2 distance + 1 rows.
            first: For a table, the index of query 0 among the keys.  By default the last query is the last key if
                causal; otherwise query 0 is key 0.
            cu_seqlens: The edges (int32, n + 1) of n packed sequences in x (1 t m), which are masked from one another.
                Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1], and its positions start at 0.

        Raises:
            ValueError: For shapes, dtypes or combinations of arguments that do not match.
            TypeError: For a cache that is not the entry of one layer.
        """
        if self.reads_all_queries and cache is not None:
            raise ValueError("MultiHeadAttention: network='sequence' reads all queries at once, so it takes no cache")
        if cache is not None and not isinstance(cache, LayerCache):
            kind = type(cache).__name__
            raise TypeError(f"MultiHeadAttention: cache must be the entry of one layer, cache[i], but is a {kind}")
        with whole(cache):  # an interrupted call adds nothing to the cache
            call = call_of(self, x, context, positions=positions, first=first, cu_seqlens=cu_seqlens, cache=cache)

            # What hides keys, what is added to scores and what multiplies the code, for all heads.
            limits = self._limits(bias, mask, keep, call)
            needs_pairs = return_code or taps is not None or limits.has_pairs

            # Projections, then the heads, group by group.
            projections = project(self.qkv, self.sizes, x, context, senders=call.computes_keys)
            symbols_by_group = self._symbols(symbols, mask, call)
            calls, outputs, y = self._attend(call, limits, projections, symbols_by_group, needs_pairs)
            if call.cache is not None:
                call.cache.advance(call.t, call.max_cached)
            if taps is not None:
                taps.append(self._taps(call, calls, outputs, y))
            if return_code:
                return y, self._code(calls)
            return y

    def _attend(
        self,
        call: LayerCall,
        limits: LayerLimits,
        projections: Sequence[Rows],
        symbols_by_group: Sequence[Tensor | None],
        needs_pairs: bool,
    ) -> tuple[list[AttentionCall | None], list[Tensor], Tensor]:
        """For each group its call (None if it adds the tokens to a state) and output (b t h e), and y (b t m)."""
        calls: list[AttentionCall | None] = []
        outputs: list[Tensor] = []
        tensors: dict[str, Tensor] = {}
        for i, group in enumerate(self.groups):
            if self._keeps_state(i, call, needs_pairs):
                tensors = {}
                calls.append(None)
                outputs.append(self._step(i, projections[i], call))
            else:
                tensors = self._op_tensors(i, projections[i], symbols_by_group[i], call, previous=tensors)
                op_call = limits.call(tensors, *self.heads_of[i])
                calls.append(op_call)
                output, gate = attended(group, op_call), self._gate(i, call.x)
                if gate is not None:
                    output = output * gate
                outputs.append(output)

        # The heads side by side, (b t h e) -> (b t h*e), and the map to the layer's output.
        joint = [output.flatten(2) for output in outputs]
        return calls, outputs, self.out(joint[0] if len(joint) == 1 else torch.cat(joint, dim=-1))

    # ------------------------------------------------------------------------------------- masks, biases and dropout
    def _add_position_bias(self, bias: Tensor | None, call: LayerCall) -> Tensor | None:
        """The sum of the given bias and the position bias; by offset (h, t+s-1) unless one of them is dense."""
        if self.relative is None or call.is_empty:
            return bias
        t, s = call.t, call.s
        if call.positions is not None:
            relative = self.relative.dense(call.positions, call.all_key_positions())
        else:
            offset = call.num_cached
            if self.causal:  # the last query is the last key
                offset = s - t
            relative = self.relative(t, s, offset=offset, device=call.x.device)
        relative = relative.to(at_least_float32(call.x.dtype))  # bfloat16 cannot hold a distance of 257
        if bias is None:
            return relative
        # One is by offset (h t+s-1) and the other by pair: their sum needs pairs.
        if bias.ndim != relative.ndim:
            return dense(bias, t, s) + dense(relative, t, s)
        return bias + relative

    def _limits(self, bias: Tensor | None, mask: Tensor | None, keep: Tensor | None, call: LayerCall) -> LayerLimits:
        """Masks, biases and dropout for the ops, with the padding of cached tokens."""
        b = call.x.shape[0]
        check_pairs((b, self.total_heads, call.t, call.gone + call.s), mask, bias, keep)
        mask, keep = call.held(mask), call.held(keep)
        bias = self._add_position_bias(call.held(bias), call)
        if keep is None and self.training and self.dropout > 0:
            samples_and_heads = (1, 1) if self.dropout_shared else (b, self.total_heads)
            shape, dtype = (*samples_and_heads, call.t, call.s), at_least_float32(call.x.dtype)
            keep = drawn_keep(shape, self.dropout, device=call.x.device, dtype=dtype)
        had_pairs = any(pairs is not None for pairs in (bias, mask, keep))
        if call.cache is not None and call.cache.real is not None and call.context is None:
            mask = both(mask, call.cache.real[:, None, None])

        # An op's window counts indices and ends at the last key.  With other positions the window becomes a mask.
        window = self.window
        # Lengths are compared only with a window: an exported model keeps every comparison as a condition.
        if window is not None and (call.positions is not None or not self._is_aligned(call)):
            queries = call.query_positions()
            distances = queries[:, None, :, None] - call.all_key_positions()[:, None, None, :]
            mask = both(mask, distances.abs() < window)
            window = None
        masks = Masks(mask, self.causal, window, call.cu_seqlens)
        return LayerLimits(bias, masks, keep, has_pairs=had_pairs)

    def _is_aligned(self, call: LayerCall) -> bool:
        """Whether the last query and the last key have the same place."""
        return self.causal or call.context is None or (call.t == call.s and call.num_cached == 0)

    # ------------------------------------------------------------------------------------------ the tensors of a group
    def _symbols(
        self, symbols: Tensor | Sequence[Tensor | None] | None, mask: Tensor | None, call: LayerCall
    ) -> Sequence[Tensor | None]:
        """The symbols of the new keys, for each group: given ones, or those of the layer's own sources."""
        needs_symbols = any(dim is not None for dim in self.symbol_dims)
        if symbols is not None and not needs_symbols:
            raise ValueError("MultiHeadAttention: its heads read no symbols, so symbols must be None")
        if not needs_symbols or not call.computes_keys:
            return [None] * len(self.groups)
        if symbols is not None:
            return symbols_of_groups(symbols, self.symbol_dims, call)
        if not self.symbols:
            raise ValueError("MultiHeadAttention: with own_symbols=False its relational heads need symbols=")
        options: dict[str, Any] = {}
        if call.context is None:
            options = {"first": call.num_cached, "cache": call.cache, "positions": call.positions}
            options["cu_seqlens"] = call.cu_seqlens
        options["mask"] = call.real_keys(mask)
        outputs = []
        for source in self.symbols:
            if isinstance(source, RelativeSymbols) and call.cu_seqlens is None:
                source.check_reach(call.t, call.s, call.first_query)
            outputs.append(source(call.key_source, **options))
        by_group: list[Tensor | None] = [None] * len(self.groups)
        for i, index in enumerate(self.source_of):
            if index is not None:
                by_group[i] = outputs[index]
        return by_group

    def _op_tensors(
        self, i: int, rows: Rows, symbols: Tensor | None, call: LayerCall, previous: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The tensors for the op of group `i`: q and q_rel of the queries; k, k_rel and v of all keys.

        Args:
            previous: The tensors of the group before, whose queries and keys the group may share.
        """
        group, features = self.groups[i], None
        if self.symbol_dims[i] is not None:
            features = symbol_group(group).features(call.x)

        # Queries (b t h d), and relation queries (b t r p) of relational heads.
        tensors = {}
        if "q" in rows:
            tensors["q"] = rows["q"]
        if features is not None:
            tensors.update(symbol_group(group).receive(features))
        if "q" in tensors:
            tensors["q"] = self._normalise_and_rotate(i, tensors["q"], call, are_queries=True)
        dtype = next(iter(tensors.values()), call.x).dtype

        tensors.update(self._all_keys(i, rows, features, symbols, call, dtype))
        if self.shared[i]:
            tensors["q"], tensors["k"] = previous["q"], previous["k"]

        # A table of relative symbols becomes symbols by offset (t+s-1 g e).
        if "table" in tensors:
            table = tensors.pop("table")
            if call.is_empty:
                tensors["v"] = table[None, :0]
            else:
                tensors["v"] = by_offset(table, call.t, call.s, call.first_query)
        if tensors["v"].ndim == 4 and tensors["v"].shape[0] == 1:  # symbols of positions are the same in all samples
            tensors["v"] = tensors["v"].expand(call.x.shape[0], -1, -1, -1)
        return tensors

    def _all_keys(
        self, i: int, rows: Rows, features: Tensor | None, symbols: Tensor | None, call: LayerCall, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The tensors of `_new_keys`, after those that the cache holds; those of a context are computed once."""
        if call.cache is None:
            return self._new_keys(i, rows, features, symbols, call)
        if call.context is None:
            tensors = {}
            for name, x in self._new_keys(i, rows, features, symbols, call).items():
                tensors[name] = x if name == "table" else call.append_to_cache((i, name), x)
            return tensors
        if call.t == 0 and call.computes_keys:  # the next call may have another context
            cached = self._new_keys(i, rows, features, symbols, call)
        else:
            cached = call.cache.computed_once(i, lambda: self._new_keys(i, rows, features, symbols, call))
        # They may have been cached under autocast and be read without it.
        return {name: x.to(torch.promote_types(x.dtype, dtype)) for name, x in cached.items()}

    def _new_keys(
        self, i: int, rows: Rows, features: Tensor | None, symbols: Tensor | None, call: LayerCall
    ) -> dict[str, Tensor]:
        """For the new keys: k (b s g d), k_rel, and v (b|1 s g e) or the table of relative symbols."""
        group = self.groups[i]
        tensors = dict(rows)
        tensors.pop("q", None)  # what is left is of the keys
        if features is not None and symbols is not None:
            if call.context is not None:
                features = symbol_group(group).features(call.context)
            tensors.update(symbol_group(group).send(features))
            name = "v" if symbols.ndim == 3 else "table"
            tensors[name] = symbol_group(group).values(symbols)
        if "k" in tensors:
            tensors["k"] = self._normalise_and_rotate(i, tensors["k"], call, are_queries=False)
        return tensors

    def _normalise_and_rotate(self, i: int, x: Tensor, call: LayerCall, *, are_queries: bool) -> Tensor:
        """Normalise and rotate the queries or the new keys of group `i`."""
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms[2 * i], self.qk_norms[2 * i + 1]
            x = q_norm(x) if are_queries else k_norm(x)
        if self.rotary is None:
            return x
        positions = call.query_positions() if are_queries else call.new_key_positions()
        table = self.rotary[str(self.sizes[i].dim)]
        if call.positions is not None and (are_queries or call.context is None):
            return table(x, positions[..., None])

        # Counted positions are checked here, because reading them would synchronise the device.  Packed sequences may
        # be short enough: their positions are read on a CPU; on a GPU the table lookup itself fails.
        length = call.s if call.positions is not None else max(call.num_cached + call.t, call.s)
        longest: Any = table.max_length
        is_too_long = length > longest
        if is_too_long and call.cu_seqlens is None:
            raise ValueError(f"MultiHeadAttention: {length} positions but max_length is {longest}")
        return table(x, positions[..., None], check=is_too_long and call.x.device.type == "cpu")

    # ------------------------------------------------------------------------------------- linear heads with a state
    def _keeps_state(self, i: int, call: LayerCall, needs_pairs: bool) -> bool:
        """Whether group `i` caches the sum over all keys and values instead of each of them.

        The first call with a cache decides.

        Args:
            needs_pairs: Whether the call has a bias, mask, keep, return_code or taps, or the layer adds a bias of
                positions or drops out.
        """
        group, cache = compiled(self.groups[i]), call.cache
        if cache is None or call.context is not None:
            return False
        has_state = (i, "state") in cache
        if not isinstance(group, LinearHeads):
            if has_state:
                kind = type(group).__name__
                raise ValueError(f"MultiHeadAttention: linear heads kept the sum of earlier tokens, got a {kind}")
            return False
        if call.num_cached == 0:
            # A group that shares queries and keys, with the one before or after it, needs each of them.
            is_shared = self.shared[i] or (i + 1 < len(self.shared) and self.shared[i + 1])
            return not needs_pairs and sums(self.groups[i]) and not is_shared and self.window is None
        if has_state and needs_pairs:
            raise ValueError(
                "MultiHeadAttention: linear heads keep the sum of earlier tokens, not each of them, so bias, mask, "
                "keep, return_code and taps must be given in the first call with a cache or in none"
            )
        return has_state

    def _step(self, i: int, rows: Rows, call: LayerCall) -> Tensor:
        """The output (b t h e) of group `i` for new tokens; their keys and values are added to its state."""
        group, cache = compiled(self.groups[i]), call.cache
        assert isinstance(group, LinearHeads)
        assert cache is not None
        q = self._normalise_and_rotate(i, rows["q"], call, are_queries=True)
        k = self._normalise_and_rotate(i, rows["k"], call, are_queries=False)
        # Which of the new tokens are real (b 1 1 t): padding must add nothing to the state.
        mask = None
        if cache.real is not None:
            mask = cache.real[:, None, None, cache.real.shape[1] - call.t :]
        output, state = group.step(q, k, rows["v"], cache.state((i, "state")), mask=mask)
        if call.num_cached + call.t > 0:  # the first call with tokens decides, see `_keeps_state`
            cache.put((i, "state"), state)
        return output

    def _gate(self, i: int, x: Tensor) -> Tensor | None:
        """What multiplies the output (b t h e) of group `i`, or None."""
        if self.gates is None or str(i) not in self.gates:
            return None
        return self.gates[str(i)](x).sigmoid().unflatten(-1, (self.sizes[i].heads, self.sizes[i].value_dim))

    # -------------------------------------------------------------------------------------------------- code and taps
    def _code(self, calls: Sequence[AttentionCall | None]) -> Tensor:
        """The code of all pairs (b h t s), recomputed from the call of each group."""
        codes = []
        for group, op_call in zip(self.groups, calls, strict=True):
            assert op_call is not None  # where codes are asked for, no group keeps a state
            codes.append(coder(group)(op_call))
        return torch.cat(codes, dim=1)

    def _value_map(self) -> tuple[Tensor, Tensor | None]:
        """The weight (rows m) of the values of all groups, and their bias."""
        (weight, bias), first = affine(self.qkv, self.dim), sum(self.widths[:2])
        return weight[first:], None if bias is None else bias[first:]

    def _taps(
        self, call: LayerCall, calls: Sequence[AttentionCall | None], outputs: Sequence[Tensor], y: Tensor
    ) -> Taps:
        """The tensors of the call and the weights around them."""
        groups: list[GroupTaps] = []
        for i, (op_call, output) in enumerate(zip(calls, outputs, strict=True)):
            assert op_call is not None  # with taps no group keeps a state
            w_value, b_value = value_weights(*self._value_map(), self.sizes, i)
            group = tapped(
                self.groups[i], op_call, output, scale=self.sizes[i].dim ** -0.5, w_value=w_value, b_value=b_value,
                w_out=out_weight(self.out, self.sizes, i), gate=self._gate(i, call.x),
            )  # fmt: skip
            groups.append(group)
        _, b_out = affine(self.out, output_width(self.sizes))
        return Taps(x=call.x, context=call.key_source, output=y, b_out=b_out, groups=tuple(groups))
