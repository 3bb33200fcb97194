"""`nn.MultiheadAttention` with any heads: the same signature, state-dict keys and conventions of masks.

    attention = MultiheadAttention(512, 8)                                     computes the same as PyTorch's module
    attention = MultiheadAttention(512, 8, heads=[ph.Softmax(4), ph.Hyla(4)])
    torch_mha.replace(model, heads)                                            all modules of a model, weights kept

Masks are PyTorch's: True masks a pair, floating masks are added to the scores.  Differences: a query without a visible
key gets 0 (NaN in PyTorch), and nested tensors are refused.  The fused inference kernel of `nn.TransformerEncoderLayer`
is never used, because it would compute softmax attention without calling `forward`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead import config
from polyhead.compat.foreign import check_mask, limits, visible
from polyhead.compat.heads import Groups, Heads, added
from polyhead.layers.call import LayerLimits, drawn_keep
from polyhead.layers.device import Device, Placement
from polyhead.layers.heads.functions import asked, attended, coder
from polyhead.layers.projection import Rows, by_offset, cut, widths_of
from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import at_least_float32, drop
from polyhead.spec.shapes import check_number

NAME = "MultiheadAttention"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class MultiheadAttention(Groups):
    """A drop-in for `nn.MultiheadAttention` whose heads may be of any mechanism.

    >>> attention = MultiheadAttention(16, 4, batch_first=True, heads=[Softmax(2), Hyla(2)])
    >>> x = torch.randn(3, 5, 16)
    >>> y, code = attention(x, x, x, average_attn_weights=False)
    >>> y.shape, code.shape
    (torch.Size([3, 5, 16]), torch.Size([3, 4, 5, 5]))

    Rows of `in_proj_weight` are queries, keys, values, head by head; relational heads have no rows for values.  The
    same seed gives the same weights as PyTorch's module.

    Raises ValueError if the heads are not `num_heads` in total, and for add_bias_kv and add_zero_attn: only softmax can
    ignore such keys.
    """

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
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        heads: Heads = None,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        check_number(NAME, "dropout", dropout, 0)
        if heads is None:
            heads = config.Softmax(num_heads)
        groups = config.head_list(NAME, heads)
        total = sum(group.heads for group in groups)
        if total != num_heads:
            raise ValueError(f"{NAME}: num_heads = {num_heads} but heads have {total}")
        for name, is_set in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if is_set:
                raise ValueError(f"{NAME}: keys must be made of the inputs but {name}=True came")

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = kdim or embed_dim
        self.vdim = vdim or embed_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.bias_k = self.bias_v = None
        self.add_zero_attn = False
        # False stops PyTorch's layers from using their fused kernel; in_proj_weight shows whether weights are joint.
        self._qkv_same_embed_dim = False
        # torch.fx, and feature extractors built on it, do not trace into modules of torch.nn, nor into this one.
        self.__module__ = nn.MultiheadAttention.__module__

        placement = Placement(device=device, dtype=dtype)
        self.add_groups(NAME, groups, embed_dim, bias=bias, max_length=max_length, **placement)
        for group in groups:
            if isinstance(group, config.SymbolHeads) and (self.kdim, self.vdim) != (embed_dim, embed_dim):
                widths = f"kdim, vdim = {embed_dim} but {self.kdim}, {self.vdim} came"
                raise ValueError(f"{NAME}: {type(group).__name__} needs {widths}")
        self._add_projections(bias, placement)

    def _add_projections(self, bias: bool, placement: Placement) -> None:
        """Create and initialise the projections in PyTorch's order, so that a seed gives the same weights."""
        widths = widths_of(self.sizes)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kdim == self.vdim == self.embed_dim:
            shapes["in_proj_weight"] = (sum(widths), self.embed_dim)
        else:
            input_widths = (self.embed_dim, self.kdim, self.vdim)
            shapes.update(zip(SEPARATE, zip(widths, input_widths, strict=True), strict=True))
        if bias:
            shapes["in_proj_bias"] = (sum(widths),)
        for name in (*SEPARATE, "in_proj_weight", "in_proj_bias"):
            parameter = None
            if name in shapes:
                parameter = nn.Parameter(torch.empty(shapes[name], **placement))
            self.register_parameter(name, parameter)
        output_width = sum(size.heads * size.value_dim for size in self.sizes)
        self.out_proj = nn.Linear(output_width, self.embed_dim, bias=bias, **placement)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Initialise as PyTorch's method of this name does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None and weight.numel():
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the code (b h t s) after dropout or its mean over heads (b t s) if `need_weights`.

        `is_causal` states that `attn_mask` is the causal mask, and requires one; as in PyTorch, the mask is read
        nevertheless if `need_weights`.  PyTorch also reads it if there is a `key_padding_mask`, this module does not:
        a wrong hint then gives another result.
        """
        _, _, calls, keep = self.read(
            query, key, value, key_padding_mask, attn_mask, is_causal=is_causal, need_weights=need_weights
        )
        # With weights PyTorch computes its softmax step by step, which has second derivatives.  So does this module.
        with sdpa_kernel(SDPBackend.MATH) if need_weights else contextlib.nullcontext():
            outputs = []
            for group, call in zip(self.groups, calls, strict=True):
                outputs.append(attended(group, call).flatten(2))
        y = self.out_proj(torch.cat(outputs, dim=-1))
        is_single = query.ndim == 2
        if is_single:
            y = y[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not need_weights:
            return y, None

        codes = []
        for group, call in zip(self.groups, calls, strict=True):
            codes.append(coder(group)(call))
        code = drop(torch.cat(codes, 1), keep)
        if average_attn_weights:
            code = code.mean(1)
        if is_single:
            code = code[0]
        return y, code

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        pairs: Tensor | None,
        *,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor, list[AttentionCall], Tensor | None]:
        """Return query and value (b t m), the call of each group's op, and the dropout mask of all heads."""
        # Equal inputs stay one tensor.
        x = batch_first(self, query)
        keys = x
        if key is not query:
            keys = batch_first(self, key)
        values = keys
        if value is not key:
            values = batch_first(self, value)
        b, t = x.shape[:2]
        s = keys.shape[1]
        shapes = ((b, t, self.embed_dim), (b, s, self.kdim), (b, s, self.vdim))
        for name, tensor, shape in zip(("query", "key", "value"), (x, keys, values), shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{NAME}: {name} must be (b t m) = {shape} but is {tuple(tensor.shape)}")

        # PyTorch believes the hint only where it returns no weights, and aligns differently if t != s.
        if is_causal and pairs is None:
            raise ValueError(f"{NAME}: is_causal says what attn_mask is, but attn_mask is None")
        is_causal = is_causal and t == s and not need_weights
        if is_causal:
            pairs = None
        masks = sdpa_masks(padding, pairs, self.num_heads, x, s)
        bias, mask = limits(masks, t, s, x.dtype)
        bias = added(NAME, self.groups, bias)
        keep = None
        if self.training and self.dropout > 0.0:
            keep = drawn_keep((b, self.num_heads, t, s), self.dropout, device=x.device, dtype=at_least_float32(x.dtype))
        layer_limits = LayerLimits(bias, mask, keep, is_causal)

        is_token = None  # False at padding, for symbols that depend on neighbours
        if padding is not None:
            is_token = torch.atleast_2d(visible(_our_polarity(padding)))
        tensors = self._group_tensors(x, keys, values, is_token)
        calls = []
        for group_tensors, (first, last) in zip(tensors, self.heads_of, strict=True):
            calls.append(layer_limits.call(group_tensors, first, last))
        return x, values, calls, keep

    def _group_tensors(self, x: Tensor, keys: Tensor, values: Tensor, is_token: Tensor | None) -> list[Rows]:
        """The tensors for the op of each group: q, k and v; for relational heads symbols as v, q_rel and k_rel."""
        symbols = [source(values, mask=is_token) for source in self.symbols]
        parts: list[Rows] = []
        for i, (group, tensors) in enumerate(zip(self.groups, self._project(x, keys, values), strict=True)):
            source = self.source_of[i]
            if source is not None:
                features = key_features = asked(group, "features")(x)
                if keys is not x:
                    key_features = asked(group, "features")(keys)
                tensors = {**tensors, **asked(group, "receive")(features), **asked(group, "send")(key_features)}
                read = asked(group, "values")(symbols[source])
                if read.ndim == 3:  # a table by offset
                    tensors["v"] = by_offset(read, x.shape[1], keys.shape[1], 0)
                else:
                    tensors["v"] = read.expand(x.shape[0], -1, -1, -1)
            if self.shared[i]:
                tensors = {**tensors, "q": parts[-1]["q"], "k": parts[-1]["k"]}
            parts.append(tensors)
        return parts

    def _project(self, x: Tensor, keys: Tensor, values: Tensor) -> list[Rows]:
        """Each group's part of the joint projections; inputs that are the same tensor are multiplied once."""
        widths = widths_of(self.sizes)
        if self.in_proj_weight is not None and x is keys and keys is values:
            return cut(F.linear(x, self.in_proj_weight, self.in_proj_bias).split(widths, dim=-1), self.sizes)
        weights, biases = projections(self, widths)
        return cut(list(map(F.linear, (x, keys, values), weights, biases)), self.sizes)

    def extra_repr(self) -> str:
        """Sizes, as `repr` shows them."""
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


def batch_first(module: Any, x: Tensor) -> Tensor:
    """(b t m) from an input or output of PyTorch's module or ours, which may be (t b m), or (t m) for one sequence."""
    if x.is_nested:
        raise ValueError(f"{NAME}: padded tensors are wanted, but a nested one came: set enable_nested_tensor=False")
    if x.ndim not in (2, 3):
        raise ValueError(f"{NAME}: query, key and value must have 2 or 3 dimensions but one is {tuple(x.shape)}")
    if x.ndim == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def sdpa_masks(padding: Tensor | None, pairs: Tensor | None, heads: int, x: Tensor, s: int) -> list[Tensor]:
    """Return PyTorch's masks as (b|1 h|1 t|1 s): Boolean ones True where a query may attend, floating ones as they are.

    `padding` is key_padding_mask, `pairs` attn_mask; `x` (b t ...) has the queries, `s` is the number of keys.  Raises
    ValueError for another dtype or shape.
    """
    b, t = x.shape[:2]
    masks = []
    for name, mask, shapes in (
        ("key_padding_mask", padding, ((s,), (b, s))),
        ("attn_mask", pairs, ((t, s), (b * heads, t, s))),
    ):
        if mask is None:
            continue
        check_mask(f"{NAME}: {name}", mask)
        if tuple(mask.shape) not in shapes:
            raise ValueError(f"{NAME}: {name} must be one of {shapes} but is {tuple(mask.shape)}")
        mask = _our_polarity(mask)
        if name == "key_padding_mask":
            mask = mask[..., None, None, :].expand(b, 1, 1, s)
        elif mask.ndim == 3:
            mask = mask.unflatten(0, (b, heads))
        else:
            mask = mask[None, None]
        masks.append(mask)
    return masks


def _our_polarity(mask: Tensor) -> Tensor:
    """PyTorch's mask with True where a query may attend; a floating mask as it is."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask


def projections(module: Any, widths: int | list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the weights and the biases of queries, keys and values, of PyTorch's module or of ours."""
    if module.in_proj_weight is None:
        weights: Sequence[Tensor] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.split(widths)
    if module.in_proj_bias is None:
        return weights, (None, None, None)
    return weights, module.in_proj_bias.split(widths)
