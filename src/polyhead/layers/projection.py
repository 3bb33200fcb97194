"""The joint projections of a layer, divided among its groups: queries, keys and values, and the output.

The rows of `qkv` are [queries of all groups | keys of all groups | values of all groups], head by head.  A group that
computes one of them otherwise (from symbols, hidden features or the previous group) has no rows for it.

A map may be wrapped (LoRA, torch.compile, FSDP).  Rows of its weight may be used only if it is `plain`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.layers.device import Placement
from polyhead.layers.heads.sizes import Sizes
from polyhead.ops.precision import autocast_dtype

# A group's part of the projection: "q" (b t h d), "k" (b s g d) and "v" (b s g e).
Rows = dict[str, Tensor]


def linear(inputs: int, outputs: int, *, bias: bool, **placement: Unpack[Placement]) -> nn.Linear:
    """A linear map.  With 0 outputs (groups may need no rows) it is not initialised, as PyTorch would warn.

    Such a map is frozen, too: its parameters never get a gradient, for which DistributedDataParallel would wait."""
    layer = nn.Linear(inputs, max(1, outputs), bias=bias, **placement)
    if outputs == 0:
        layer.out_features = 0
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(parameter.detach()[:0].clone(), requires_grad=False))
    return layer


def hooked(layer: nn.Module) -> bool:
    """Whether a call of the layer also calls hooks."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def computes(layer: nn.Module, *forwards: Callable[..., object]) -> bool:
    """Whether the layer's `forward` is one of these, not that of a subclass or one that was assigned to the layer."""
    return type(layer).forward in forwards and "forward" not in vars(layer)


def plain(layer: nn.Module) -> bool:
    """Whether a layer computes just its weight and bias, so that rows of them may be used separately."""
    return type(layer) is nn.Linear and computes(layer, nn.Linear.forward) and not hooked(layer)


@torch.no_grad()
def affine(layer: Any, width: int) -> tuple[Float[Tensor, "o i"], Float[Tensor, " o"] | None]:
    """The effective weight and bias of a linear map of inputs of this width; for a wrapped map, computed from unit
    vectors and 0."""
    if isinstance(layer, nn.Linear) and computes(layer, nn.Linear.forward):  # plain, or parametrised
        weight: Tensor = layer.weight
        if type(weight).__module__.startswith("torchao."):  # a quantised tensor cannot be reshaped
            weight = weight.dequantize()
        return weight, layer.bias
    tensors = (*layer.parameters(), *layer.buffers())  # quantised maps may hold bytes, or nothing
    device = next((x.device for x in tensors), None)
    dtype = next((x.dtype for x in tensors if x.is_floating_point() and x.itemsize > 1), None)
    # Unit vectors, then a last row of 0: the bias is the output for 0, and the others minus it are columns.
    units = torch.eye(width + 1, width, device=device, dtype=dtype)
    y = layer(units[None])[0]
    return (y[:-1] - y[-1]).T, y[-1]


def widths_of(sizes: Sequence[Sizes]) -> list[int]:
    """Numbers of rows of queries, of keys and of values."""
    totals = [0, 0, 0]
    for size in sizes:
        for part, width in enumerate(size.widths):
            totals[part] += width
    return totals


def project(qkv: Any, sizes: Sequence[Sizes], x: Tensor, context: Tensor | None, *, senders: bool = True) -> list[Rows]:
    """Each group's queries from `x`, and keys and values from `context` (None: from `x`).

    Args:
        senders: Whether keys and values of a context are computed.

    Raises:
        ValueError: For another dtype than that of the weights, without autocast.
    """
    for name, tokens in (("x", x), ("context", context)):
        if tokens is not None and plain(qkv) and tokens.dtype != qkv.weight.dtype and autocast_dtype(x) is None:
            kinds = f"{qkv.weight.dtype}, as its weights, but is {tokens.dtype}"
            raise ValueError(f"MultiHeadAttention: {name} must be {kinds}")
    widths = widths_of(sizes)
    if context is None:
        parts = list(qkv(x).split(widths, dim=-1))
    elif not plain(qkv):  # a wrapped map is called in full, although some of its outputs are not needed
        parts = [qkv(x)[..., : widths[0]]]
        if senders:
            parts += qkv(context).split(widths, dim=-1)[1:]
    else:
        # Queries come from x, keys and values from the context: each product needs only its rows of the weight.
        sizes_of_maps = (widths[0], widths[1] + widths[2])
        q_weight, kv_weight = qkv.weight.split(sizes_of_maps)
        q_bias = kv_bias = None
        if qkv.bias is not None:
            q_bias, kv_bias = qkv.bias.split(sizes_of_maps)
        parts = [F.linear(x, q_weight, q_bias)]
        if senders:
            parts += F.linear(context, kv_weight, kv_bias).split(widths[1:], dim=-1)
    return cut(parts, sizes)


def cut(parts: Sequence[Tensor], sizes: Sequence[Sizes]) -> list[Rows]:
    """Each group's part of the joint queries, keys and values (b t c), or of queries alone."""
    rows: list[Rows] = [{} for _ in sizes]
    for part, (name, joint) in enumerate(zip("qkv", parts, strict=False)):
        pieces: Sequence[Tensor] = [joint]
        if len(sizes) > 1:
            pieces = joint.split([size.widths[part] for size in sizes], dim=-1)
        for of_group, size, piece in zip(rows, sizes, pieces, strict=True):
            if name in size.takes:
                shape = {
                    "q": (size.heads, size.dim),
                    "k": (size.kv_heads, size.dim),
                    "v": (size.kv_heads, size.value_dim),
                }[name]
                of_group[name] = piece.unflatten(-1, shape)
    return rows


def value_weights(
    weight: Tensor, bias: Tensor | None, sizes: Sequence[Sizes], i: int
) -> tuple[Tensor | None, Tensor | None]:
    """The weight (g e m) and bias (g e) of the values of group `i`, from those of all groups; None for symbols."""
    size, row = sizes[i], sum(other.widths[2] for other in sizes[:i])
    if "v" not in size.takes:
        return None, None
    rows, shape = slice(row, row + size.widths[2]), (size.kv_heads, size.value_dim)
    if bias is not None:
        bias = bias[rows].unflatten(0, shape)
    return weight[rows].unflatten(0, shape), bias


def out_weight(out: nn.Module, sizes: Sequence[Sizes], i: int) -> Float[Tensor, "h m e"]:
    """The map from each head of group `i` to the layer's output."""
    size, column = sizes[i], output_width(sizes[:i])
    columns = affine(out, output_width(sizes))[0][:, column : column + size.heads * size.value_dim]
    return columns.unflatten(1, (size.heads, size.value_dim)).transpose(0, 1)


def output_width(sizes: Sequence[Sizes]) -> int:
    """The width of the outputs of all heads side by side."""
    return sum(size.heads * size.value_dim for size in sizes)


def distances(t: int, s: int, first: int, device: torch.device) -> Tensor:
    """The t + s - 1 distances, query position minus key position, of a tensor by offset: that of query i and key j in
    row j - i + t - 1.  Query i is at position `first` + i, key j at j."""
    return first + t - 1 - torch.arange(t + s - 1, device=device)


def by_offset(table: Tensor, t: int, s: int, first: int) -> Tensor:
    """The rows of a table (2 distance + 1 ...) for clipped offsets, as an op reads them, see `distances`."""
    # The middle row is that of offset 0; offsets, key minus query, are negative distances.
    distance = table.shape[0] // 2
    return table[distance - distances(t, s, first, table.device).clamp(-distance, distance)]
