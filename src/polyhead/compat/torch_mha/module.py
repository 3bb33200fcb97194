"""`nn.MultiheadAttention` with any heads: the same signature, state-dict keys and conventions of masks.

    attention = MultiheadAttention(512, 8)                                     computes the same as PyTorch's module
    attention = MultiheadAttention(512, 8, heads=[ph.Softmax(4), ph.Hyla(4)])
    torch_mha.replace(model, heads)                                            all modules of a model, weights kept

Masks are PyTorch's: True masks a pair, floating masks are added to the scores.  Differences: a query without a visible
key gets 0 (NaN in PyTorch), and nested tensors are refused.  The fused inference kernel of `nn.TransformerEncoderLayer`
is never used, because it would compute softmax attention without calling `forward`.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.compat.foreign import check_mask, limits, shown, unread
from polyhead.compat.heads import Heads, OurHeads, added
from polyhead.layers.cache import LayerCache
from polyhead.layers.call import LayerLimits
from polyhead.layers.device import Device
from polyhead.layers.heads.functions import coder
from polyhead.layers.projection import Rows, cut, widths_of
from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import drop
from polyhead.spec.shapes import check_number

WHO = "MultiheadAttention"
Masks = tuple[Tensor | None, Tensor | None]
"""Our bias and mask."""
LATE = ("kdim", "vdim", "batch_first", "device", "dtype")
"""Arguments of the constructor after the sixth."""


class MultiheadAttention(OurHeads):
    """A drop-in for `nn.MultiheadAttention` whose heads may be of any mechanism.

    >>> attention = MultiheadAttention(16, 4, batch_first=True, heads=[Softmax(2), Hyla(2)])
    >>> x = torch.randn(3, 5, 16)
    >>> y, code = attention(x, x, x, average_attn_weights=False)
    >>> y.shape, code.shape
    (torch.Size([3, 5, 16]), torch.Size([3, 4, 5, 5]))

    Rows of `in_proj_weight` are queries, keys, values, head by head, for every mechanism.  Relational heads and HYLA
    with `value_depth=2` have further parameters in `groups` and `symbols`; relational heads have no rows for values.
    The same seed gives the same weights as PyTorch's module.

    Raises ValueError if the heads are not `num_heads` in total, and for add_bias_kv and add_zero_attn: only softmax can
    ignore such keys.
    """

    memory: LayerCache | None = None  # set by `cached`
    called: bool | None = None  # whether it was, in the present call of a cached model; None: outside of one
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        *late: Any,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        heads: Heads = None,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        named: dict[str, Any] = dict(zip(LATE, (kdim, vdim, batch_first, device, dtype), strict=True))
        _check_late(late, named)
        named |= dict(zip(LATE, late, strict=False))
        check_number(WHO, "dropout", dropout, 0)
        groups = config.head_list(WHO, config.Softmax(num_heads) if heads is None else heads)
        total = sum(group.heads for group in groups)
        if total != num_heads:
            raise ValueError(f"{WHO}: num_heads = {num_heads} but heads have {total}")
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(f"{WHO}: keys must be made of the inputs but {name}=True came")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = named["kdim"] or embed_dim, named["vdim"] or embed_dim
        self.dropout, self.batch_first, self.bias_k, self.bias_v = dropout, named["batch_first"], None, None
        self.add_zero_attn = False
        # False stops PyTorch's layers from using their fused kernel; in_proj_weight shows whether weights are joint.
        self._qkv_same_embed_dim = False
        device, dtype = named["device"], named["dtype"]
        self.add_groups(WHO, groups, self.embed_dim, bias=bias, max_length=max_length, device=device, dtype=dtype)
        if len(self.symbols) and (self.kdim, self.vdim) != (self.embed_dim, self.embed_dim):
            who = next(type(group).__name__ for group in groups if isinstance(group, config.SymbolHeads))
            raise ValueError(f"{WHO}: {who} needs kdim, vdim = {self.embed_dim} but {self.kdim}, {self.vdim} came")
        self._add_projections(bias, device, dtype)

    def _add_projections(self, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        """Create and initialise the projections in PyTorch's order, so that a seed gives the same weights."""
        widths, sides = widths_of(self.sizes), (self.embed_dim, self.kdim, self.vdim)
        joint = len(set(sides)) == 1
        empty = partial(torch.empty, device=device, dtype=dtype)
        for name, width, side in zip("qkv", widths, sides, strict=True):
            parameter = None if joint else nn.Parameter(empty(width, side))
            self.register_parameter(f"{name}_proj_weight", parameter)
        rows = nn.Parameter(empty(sum(widths), self.embed_dim)) if joint else None
        self.register_parameter("in_proj_weight", rows)
        self.register_parameter("in_proj_bias", nn.Parameter(empty(sum(widths))) if bias else None)
        out = sum(size.heads * size.value_dim for size in self.sizes)
        self.out_proj = nn.Linear(out, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Initialise as PyTorch's method of this name; parameters of groups as in our own layers."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None and weight.numel():
                nn.init.xavier_uniform_(weight)
        for offset in (self.in_proj_bias, self.out_proj.bias):
            if offset is not None:
                nn.init.zeros_(offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        *late: bool,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the code (b h t s) after dropout or its mean over heads (b t s); None unless `need_weights`.

        Shapes are PyTorch's: (t b m), (b t m) if `batch_first`, (t m) for one sequence.  True in a mask masks a pair;
        floating masks are added to the scores.  `is_causal` states that `attn_mask` is the causal mask, and requires
        one; as in PyTorch, the mask is read nevertheless if `need_weights`.  PyTorch also reads it if there is a
        `key_padding_mask`, this module does not: a wrong hint then gives another result.
        """
        average, causal = (*late, *(average_attn_weights, is_causal)[len(late) :])
        one, first = query.ndim == 2, self.batch_first
        _, _, calls, keep = self.read(query, key, value, key_padding_mask, attn_mask, causal, weights=need_weights)
        y = self.out_proj(self.outputs(calls))
        y = y[0] if one else y if first else y.transpose(0, 1)
        if not need_weights:
            return y, None
        codes = [coder(group)(own) for group, own in zip(self.own_groups(), calls, strict=True)]
        code = drop(torch.cat(codes, 1), keep)
        code = code.mean(1) if average else code
        return y, code[0] if one else code

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        pairs: Tensor | None,
        causal: bool,
        *,
        weights: bool,
    ) -> tuple[Tensor, Tensor, list[AttentionCall], Tensor | None]:
        """For a call: query and value (b t m), the call of each group's op, and the dropout mask of all heads."""
        x = self._batch_first(query)  # equal inputs stay one tensor
        keys = x if key is query or self._continues(query, key) else self._batch_first(key)
        values = keys if value is key else self._batch_first(value)
        self._check(x, keys, values)
        b, t, own = *x.shape[:2], keys is x
        memory = None if self.memory is None else self._entry(self.memory, None if own else (keys, values))
        decodes, past = own and memory is not None, 0 if memory is None else memory.length
        s = past + t if decodes else keys.shape[1]
        if causal and pairs is None and not decodes:
            raise ValueError(f"{WHO}: is_causal says what attn_mask is, but attn_mask is None")
        causal = causal and (decodes or (t == s and not weights))  # not read; for t != s PyTorch aligns differently
        keep = self.draw_keep(self.dropout, b, t, s, x)
        bias, mask = self._limits(padding, None if causal else pairs, x, s)
        seen = LayerLimits(bias, mask, keep, causal or decodes)
        real = None  # mask of real keys, for symbols that depend on neighbours
        if padding is not None:
            real = ~padding if padding.dtype == torch.bool else shown(padding)
            real = torch.atleast_2d(real)[:, s - values.shape[1] :]
        rows = self._project(x, keys, values, senders=own or past == 0)
        parts = self.tensors(rows, x, keys, values, real, memory)
        if memory is not None:
            memory.advance(t, None)
        return x, values, [seen.call(part, i, j) for part, (i, j) in zip(parts, self.heads_of, strict=True)], keep

    def _continues(self, query: Tensor, key: Tensor) -> bool:
        """Whether a call with a cache is self-attention though its key is another tensor object than its query.

        They may be two views of the same memory, or copies.  Cross-attention is not asked again after its first call.
        """
        if self.memory is None or unread(query):
            return False
        return _one_view(query, key) or (not self.memory.crossed and _equal(query, key))

    def _entry(self, cache: LayerCache, context: tuple[Tensor, Tensor] | None) -> LayerCache:
        """The part of the cache for this call: of self-attention or, with a `context` (keys and values, b s m), of
        cross-attention.

        Raises ValueError for a cache of another module, for both kinds of attention, for a second call of the module in
        one call of the model, and for another context of the same length.
        """
        memory = cache if context is None else cache.cross
        if cache.crossed if context is None else cache.length:
            now, before = ("self", "cross") if context is None else ("cross", "self")
            raise ValueError(f"{WHO}: {before}-attention is in its cache but {now}-attention came (see cached)")
        if self.called:
            raise ValueError(f"{WHO}: with a cache a model must call it once in each pass but called it twice")
        if self.called is not None:
            vars(self)["called"] = True  # quicker than Module.__setattr__
        memory.claim(WHO, self)
        if context is not None and not unread(context[0]):
            new = dict(zip(("keys", "values"), context[: 1 if context[1] is context[0] else 2], strict=False))
            kept = memory.once(
                "context", lambda: {name: x.detach() if x.requires_grad else x for name, x in new.items()}
            )
            for name in kept.keys() & new.keys() if memory.length else ():
                if not _one_view(kept[name], new[name]) and _differ(kept[name], new[name]):
                    raise ValueError(f"{WHO}: {name} as in its first call were wanted but others came (see cached)")
        return memory

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.is_nested:
            raise ValueError(f"{WHO}: padded tensors are wanted, but a nested one came: set enable_nested_tensor=False")
        if x.ndim not in (2, 3):
            raise ValueError(f"{WHO}: query, key and value must have 2 or 3 dimensions but one is {tuple(x.shape)}")
        return x[None] if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1)

    def _check(self, x: Tensor, keys: Tensor, values: Tensor) -> None:
        (b, t), s = x.shape[:2], keys.shape[1]
        for name, part, wanted in (
            ("query", x, (b, t, self.embed_dim)),
            ("key", keys, (b, s, self.kdim)),
            ("value", values, (b, s, self.vdim)),
        ):
            if tuple(part.shape) != wanted:
                raise ValueError(f"{WHO}: {name} must be (b t m) = {wanted} but is {tuple(part.shape)}")

    def _limits(self, padding: Tensor | None, pairs: Tensor | None, x: Tensor, s: int) -> Masks:
        """Our bias and mask (True where a query may attend) from PyTorch's masks."""
        bias, look = limits(sdpa_masks(padding, pairs, self.num_heads, x, s), x.shape[1], s, x.dtype)
        return added(WHO, self.own_groups(), bias), look

    def output(self) -> nn.Module:
        """The map from the heads to the output."""
        return self.out_proj

    def values_of(self, i: int) -> tuple[Tensor | None, Tensor | None]:
        """The weight (g e m) and bias (g e) of the values of group `i`; None if they are symbols."""
        size, row = self.sizes[i], sum(other.widths[2] for other in self.sizes[:i])
        if "v" not in size.takes:
            return None, None
        rows, shape = slice(row, row + size.widths[2]), (size.kv_heads, size.value_dim)
        weights, biases = projections(self, widths_of(self.sizes))
        weight, bias = weights[2].detach(), biases[2]
        return weight[rows].unflatten(0, shape), None if bias is None else bias.detach()[rows].unflatten(0, shape)

    def _project(self, x: Tensor, keys: Tensor, values: Tensor, *, senders: bool) -> list[Rows]:
        """Each group's part of the joint projections; inputs that are the same tensor are multiplied once.

        `senders=False`: queries only, as a cache holds the rest.
        """
        widths, weight = widths_of(self.sizes), self.in_proj_weight
        if senders and weight is not None and x is keys and keys is values:
            return cut(F.linear(x, weight, self.in_proj_bias).split(widths, dim=-1), self.sizes)
        weights, biases = projections(self, widths)
        inputs = (x, keys, values) if senders else (x,)
        return cut([F.linear(*part) for part in zip(inputs, weights, biases, strict=False)], self.sizes)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


def sdpa_masks(padding: Tensor | None, pairs: Tensor | None, heads: int, x: Tensor, s: int) -> list[Tensor]:
    """PyTorch's key_padding_mask and attn_mask as (b|1 h|1 t|1 s): Boolean ones True where a query may attend.

    `x` (b t ...) has the queries, `s` is the number of keys.  Raises ValueError for another dtype or shape.
    """
    (b, t), given = x.shape[:2], []
    for name, mask, shapes in (
        ("key_padding_mask", padding, {1: (s,), 2: (b, s)}),
        ("attn_mask", pairs, {2: (t, s), 3: (b * heads, t, s)}),
    ):
        if mask is None:
            continue
        check_mask(f"{WHO}: {name}", mask)
        if tuple(mask.shape) != shapes.get(mask.ndim):
            raise ValueError(f"{WHO}: {name} must be one of {tuple(shapes.values())} but is {tuple(mask.shape)}")
        mask = ~mask if mask.dtype == torch.bool else mask
        if name == "key_padding_mask":
            given.append(mask[..., None, None, :].expand(b, 1, 1, s))
        else:
            given.append(mask.unflatten(0, (b, heads)) if mask.ndim == 3 else mask[None, None])
    return given


def projections(module: Any, widths: int | list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """The weights and the biases of queries, keys and values, of PyTorch's module or of ours."""
    joint, offsets = module.in_proj_weight, module.in_proj_bias
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return separate if joint is None else joint.split(widths), (None,) * 3 if offsets is None else offsets.split(widths)


def _check_late(late: tuple[object, ...], named: dict[str, object]) -> None:
    """Raise TypeError for more positional arguments than PyTorch's module has, and for one that is given twice."""
    if len(late) > len(LATE):
        raise TypeError(f"{WHO}: only {6 + len(LATE)} arguments may be positional, the last is {LATE[-1]}")
    for name in LATE[: len(late)]:
        if named[name]:
            raise TypeError(f"{WHO}: {name} is given twice, by position and by name")


def _one_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same part of the same memory."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.is_set_to(b))


def _equal(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)


def _differ(kept: Tensor, context: Tensor) -> bool:
    """Whether two contexts of one shape differ by more than rounding: a caller may compute one in each call."""
    if kept.shape != context.shape or not kept.numel():
        return False
    slack = max(torch.finfo(x.dtype).eps for x in (kept, context)) ** 0.5
    a, b = (x.to(torch.promote_types(kept.dtype, context.dtype)) for x in (kept, context))
    return not torch.allclose(a, b, rtol=slack, atol=slack * float(a.abs().mean().nan_to_num()), equal_nan=True)


_FORWARD, _INIT = (inspect.signature(f) for f in (nn.MultiheadAttention.forward, nn.MultiheadAttention.__init__))
_OWN = [inspect.signature(MultiheadAttention.__init__).parameters[name] for name in ("heads", "max_length")]
# The signature that help() shows; names and order of the arguments are PyTorch's.
MultiheadAttention.forward.__signature__ = _FORWARD  # type: ignore[attr-defined]
MultiheadAttention.__signature__ = _INIT.replace(  # type: ignore[attr-defined]
    parameters=[*list(_INIT.parameters.values())[1:], *_OWN]
)
