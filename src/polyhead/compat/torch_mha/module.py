"""`nn.MultiheadAttention` with any heads: the same signature, state-dict keys and conventions of masks.

Masks are PyTorch's: True masks a pair, floating masks are added to the scores.  Differences: a query without a visible
key gets 0 (NaN in PyTorch), and nested tensors are refused.  The fused inference kernel of `nn.TransformerEncoderLayer`
is never used, because it would compute softmax attention without calling `forward`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead import config
from polyhead.compat.foreign import limits, visible
from polyhead.compat.heads import Heads, added
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.call import call_of
from polyhead.layers.device import Device, Placement
from polyhead.layers.projection import cut, output_width
from polyhead.layers.taps import Taps
from polyhead.ops.latent_code import drop, of_pairs

NAME = "MultiheadAttention"
MAPS = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight", "in_proj_bias")


class MultiheadAttention(MultiHeadAttention):
    """A drop-in for `nn.MultiheadAttention`, with heads of any mechanism; by default it computes the same.

    >>> attention = MultiheadAttention(16, 4, batch_first=True, heads=[Softmax(2), Hyla(2)])
    >>> x = torch.randn(3, 5, 16)
    >>> y, code = attention(x, x, x, average_attn_weights=False)
    >>> y.shape, code.shape
    (torch.Size([3, 5, 16]), torch.Size([3, 4, 5, 5]))

    Rows of `in_proj_weight` are queries, keys, values, head by head; relational heads have no rows for values.  The
    same seed gives the same weights as PyTorch's module.

    Raises:
        ValueError: If the heads are not `num_heads` in total, and for add_bias_kv and add_zero_attn: only softmax can
            ignore such keys.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None

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
        # The maps, which the base class builds by `_build_maps`, have these widths.
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim or embed_dim, vdim or embed_dim
        heads = config.Softmax(num_heads) if heads is None else heads
        placement = Placement(device=device, dtype=dtype)
        super().__init__(embed_dim, heads, bias=bias, dropout=dropout, max_length=max_length, **placement)
        if self.total_heads != num_heads:
            raise ValueError(f"{NAME}: heads must add up to num_heads = {num_heads}, got {self.total_heads}")
        if add_bias_kv or add_zero_attn:
            raise ValueError(f"{NAME}: keys must be made of the inputs but add_bias_kv or add_zero_attn is True")
        if self.in_proj_weight is None and not all("v" in size.takes for size in self.sizes):
            raise ValueError(f"{NAME}: heads with symbols take no kdim and vdim: they read keys as wide as queries")
        self.num_heads, self.head_dim, self.batch_first = num_heads, embed_dim // num_heads, batch_first
        self.bias_k, self.bias_v, self.add_zero_attn = None, None, False
        # False stops PyTorch's layers from using their fused kernel; in_proj_weight shows whether weights are joint.
        self._qkv_same_embed_dim = False
        # torch.fx, and feature extractors built on it, do not trace into modules of torch.nn, nor into this one.
        self.__module__ = nn.MultiheadAttention.__module__

    def _build_maps(self, bias: bool, placement: Placement) -> None:
        """Create and initialise the projections in PyTorch's order, so that a seed gives the same weights."""
        inputs = (self.embed_dim, self.kdim, self.vdim)
        if len(set(inputs)) == 1:
            shapes: dict[str, tuple[int, ...]] = {"in_proj_weight": (sum(self.widths), self.embed_dim)}
        else:
            shapes = dict(zip(MAPS, zip(self.widths, inputs, strict=True), strict=False))
        self.out_proj = nn.Linear(output_width(self.sizes), self.embed_dim, bias=bias, **placement)
        if bias:
            shapes["in_proj_bias"] = (sum(self.widths),)
            nn.init.zeros_(self.out_proj.bias)
        for name in MAPS:
            parameter = None
            if name in shapes:
                parameter = nn.Parameter(torch.zeros(shapes[name], **placement))
                if parameter.ndim == 2 and parameter.numel():
                    nn.init.xavier_uniform_(parameter)
            self.register_parameter(name, parameter)

    @property
    def out(self) -> nn.Linear:  # type: ignore[override]
        """The output map under the name that the base class reads."""
        return self.out_proj

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        taps: list[Taps] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the code (b h t s) after dropout or its mean over heads (b t s) if `need_weights`.

        Args:
            is_causal: A hint that `attn_mask`, which must be there, is the causal mask.  The mask is read nevertheless
                if `need_weights`, as in PyTorch.  With a `key_padding_mask` PyTorch reads the mask, too.  This module
                does not: a wrong hint then gives another result.
        """
        # Equal inputs stay one tensor.
        x = self._batch_first("query", query, self.embed_dim)
        keys = x if key is query and self.kdim == self.embed_dim else self._batch_first("key", key, self.kdim)
        values = keys if value is key and self.vdim == self.kdim else self._batch_first("value", value, self.vdim)
        call = call_of(self, x, None if keys is x else keys, positions=None, first=None, cu_seqlens=None, cache=None)

        # PyTorch believes the hint only where it returns no weights, and aligns differently if t != s.
        if is_causal and attn_mask is None:
            raise ValueError(f"{NAME}: is_causal says what attn_mask is, but attn_mask is None")
        if attn_mask is not None and self.reads_all_queries:
            raise ValueError(f"{NAME}: network='sequence' reads all queries, so attn_mask would hide none of them")
        is_causal = is_causal and call.t == call.s and not need_weights
        masks, is_token = [], None  # is_token is False at padding, for symbols that depend on neighbours
        if key_padding_mask is not None:
            shape = (call.s,) if query.ndim == 2 else (x.shape[0], call.s)
            padding = _our_polarity("key_padding_mask", key_padding_mask, shape).expand(x.shape[0], call.s)
            masks.append(padding[:, None, None])
            is_token = visible(masks[0])
        if attn_mask is not None and not is_causal:
            shapes = (call.t, call.s), (x.shape[0] * self.num_heads, call.t, call.s)
            pairs = _our_polarity("attn_mask", attn_mask, *shapes)
            if pairs.ndim == 3:
                pairs = pairs.unflatten(0, (x.shape[0], self.num_heads))  # (b h t s)
            masks.append(of_pairs(pairs))
        bias, mask = limits(masks, call.t, call.s, x.dtype)
        layer_limits = self._limits(added(NAME, self.groups, bias), mask, None, call)
        layer_limits = replace(layer_limits, masks=replace(layer_limits.masks, causal=is_causal))

        # Inputs that are the same tensor are multiplied once.
        if self.in_proj_weight is not None and x is keys and keys is values:
            joint = F.linear(x, self.in_proj_weight, self.in_proj_bias).split(self.widths, dim=-1)
        else:
            joint = list(map(F.linear, (x, keys, values), *self._maps()))
        rows = cut(joint, self.sizes)
        symbols = self._symbols(None, is_token, replace(call, context=values))
        # With weights PyTorch computes its softmax step by step, which has second derivatives.  So does this module.
        with sdpa_kernel(SDPBackend.MATH) if need_weights else contextlib.nullcontext():
            calls, outputs, y = self._attend(call, layer_limits, rows, symbols, needs_pairs=True)
        if taps is not None:
            taps.append(replace(self._taps(call, calls, outputs, y), context=values))
        code = None
        if need_weights:
            code = drop(self._code(calls), layer_limits.keep)
            if average_attn_weights:
                code = code.mean(1)
            if query.ndim == 2:
                code = code[0]
        if query.ndim == 2:
            return y[0], code
        if not self.batch_first:
            y = y.transpose(0, 1)
        return y, code

    def _batch_first(self, name: str, x: Tensor, width: int) -> Tensor:
        """(b t m) from an input, which may be (t b m), or (t m) for one sequence."""
        if not isinstance(x, Tensor) or x.is_nested or x.ndim not in (2, 3):
            raise ValueError(f"{NAME}: inputs must be (b t m) or (t m), not nested: set enable_nested_tensor=False")
        if x.shape[-1] != width:
            raise ValueError(f"{NAME}: {name} must have a last axis of {width} but is {tuple(x.shape)}")
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _maps(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The weights and the biases of queries, keys and values."""
        weights, biases = [getattr(self, name) for name in MAPS[:3]], (None, None, None)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.split(self.widths)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split(self.widths)
        return weights, biases

    def _value_map(self) -> tuple[Tensor, Tensor | None]:
        weights, biases = self._maps()
        return weights[2], biases[2]


def _our_polarity(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """PyTorch's mask with True where a query may attend; a floating mask as it is.  Raises ValueError for others."""
    if tuple(mask.shape) not in shapes or not (mask.dtype == torch.bool or mask.is_floating_point()):
        allowed, actual = " or ".join(map(str, shapes)), f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"{NAME}: {name} must be Boolean or floating of shape {allowed} but is {actual}")
    return ~mask if mask.dtype == torch.bool else mask
