"""The joint projections of a layer, cut into groups: queries, keys and values before, the output after.

The rows of `qkv` are [queries of all groups | keys of all groups | values of all groups], head after head; a group that
makes one of them otherwise (from symbols, from hidden features, from the group before) has no rows there.

A map may have been wrapped (LoRA, torch.compile, FSDP): its rows stand for it only where it is `plain`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.config.sizes import Sizes
from polyhead.layers import Device

Rows = dict[str, Tensor]
"""What a group takes of the projection, by the names "q" (b t h d), "k" (b s g d) and "v" (b s g e)."""


def linear(inputs: int, outputs: int, *, bias: bool, device: Device, dtype: torch.dtype | None) -> nn.Linear:
    """A linear map; one without outputs, of groups that take nothing here, has no values that PyTorch could warn of."""
    layer = nn.Linear(inputs, max(1, outputs), bias=bias, device=device, dtype=dtype)
    if outputs == 0:
        layer.out_features = 0
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(parameter.detach()[:0]))
    return layer


def plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else, so that rows of them may stand for it."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and not hooked


@torch.no_grad()
def affine(layer: Any) -> tuple[Float[Tensor, "o i"], Float[Tensor, " o"] | None]:
    """The weight and bias of a linear map as it is called: of a wrapped one, what it does to unit vectors and to 0."""
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:  # plain, or parametrised
        return layer.weight, layer.bias
    like = next(layer.parameters())
    units = torch.eye(layer.in_features + 1, layer.in_features, device=like.device, dtype=like.dtype)
    y = layer(units[None])[0]
    return (y[:-1] - y[-1]).T, y[-1]


def widths_of(sizes: Sequence[Sizes]) -> list[int]:
    """Rows of queries, of keys and of values."""
    return [sum(size.widths[part] for size in sizes) for part in range(3)]


def project(qkv: Any, sizes: Sequence[Sizes], x: Tensor, context: Tensor | None, *, senders: bool = True) -> list[Rows]:
    """What each group takes: queries of `x`, and keys and values of `context` (None: of `x`, too).

    `senders=False`: queries alone.
    """
    widths = widths_of(sizes)
    if context is None:
        parts = list(qkv(x).split(widths, dim=-1))
    elif not plain(qkv):  # its rows are not for us to take, so some of what it gives is for nothing
        parts = [qkv(x)[..., : widths[0]], *(qkv(context).split(widths, dim=-1)[1:] if senders else ())]
    else:
        weight, offset, queries = qkv.weight, qkv.bias, widths[0]
        parts = [F.linear(x, weight[:queries], None if offset is None else offset[:queries])]
        if senders:
            kv = F.linear(context, weight[queries:], None if offset is None else offset[queries:])
            parts += kv.split(widths[1:], dim=-1)
    rows: list[Rows] = [{} for _ in sizes]
    for part, (name, joint) in enumerate(zip("qkv", parts, strict=False)):
        pieces = [joint] if len(sizes) == 1 else joint.split([size.widths[part] for size in sizes], dim=-1)
        for own, size, piece in zip(rows, sizes, pieces, strict=True):
            if name in size.takes:
                heads = size.heads if name == "q" else size.kv_heads
                own[name] = piece.unflatten(-1, (heads, size.value_dim if name == "v" else size.dim))
    return rows


def value_weights(qkv: nn.Module, sizes: Sequence[Sizes], i: int) -> tuple[Tensor | None, Tensor | None]:
    """The weight (g e m) and bias (g e) of the values of group `i`; None where `qkv` does not make them."""
    size, widths = sizes[i], widths_of(sizes)
    if "v" not in size.takes:
        return None, None
    row = widths[0] + widths[1] + sum(other.widths[2] for other in sizes[:i])
    rows, shape = slice(row, row + size.widths[2]), (size.kv_heads, size.value_dim)
    weight, bias = affine(qkv)
    return weight[rows].unflatten(0, shape), None if bias is None else bias[rows].unflatten(0, shape)


def out_weight(out: nn.Module, sizes: Sequence[Sizes], i: int) -> Float[Tensor, "h m e"]:
    """What maps each head of group `i` to the layer's output."""
    size, column = sizes[i], sum(other.heads * other.value_dim for other in sizes[:i])
    columns = affine(out)[0][:, column : column + size.heads * size.value_dim]
    return columns.unflatten(1, (size.heads, size.value_dim)).transpose(0, 1)


def by_offset(table: Tensor, t: int, s: int, first: int) -> Tensor:
    """Rows of a table (2 distance + 1 ...) by clipped offset, for the op: row j - i + t - 1 (of t + s - 1) is that of
    key j for query i, which is token `first` + i of the keys."""
    distance = table.shape[0] // 2
    offset = torch.arange(1 - t - first, s - first, device=table.device)
    return table[offset.clamp(-distance, distance) + distance]
