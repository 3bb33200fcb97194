"""Replace every `nn.MultiheadAttention` of a model by ours; weights are kept."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from polyhead.compat.heads import Heads, is_plain
from polyhead.compat.torch_mha.module import MAPS, MultiheadAttention
from polyhead.layers.device import Device


def replace(model: nn.Module, heads: Heads = None, *, max_length: int = 512) -> int:
    """Replace every `nn.MultiheadAttention` in `model` by ours, with the same weights; return how many.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    >>> replace(model, [Softmax(2), Hyla(2)])
    2

    Parameters are the same objects, so an optimiser still updates them.  With relational heads the joint matrix is a
    new one, without the rows of values that these heads do not use: those rows become the maps of their symbols.

    Raises:
        ValueError: For heads of other widths or another number, add_bias_kv, add_zero_attn, and a model without such a
            module.  Also for a subclass, which may compute something else, and for a module with hooks or wrappers
            (PEFT, a parametrised output), which would be lost.  Nothing is replaced then.
    """
    # All are built before any is put in, so an error changes nothing.
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module is not model:
            replacements[module] = drop_in(module, heads, max_length=max_length)
    if not replacements:
        raise ValueError(f"replace: {type(model).__name__} holds no nn.MultiheadAttention; drop_in takes one itself")
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            model.set_submodule(name, replacements[module])
        # Nested tensors exist for the fused kernel, which would not call our module.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return len(replacements)


def drop_in(old: nn.Module, heads: Heads = None, *, max_length: int = 512) -> MultiheadAttention:
    """Our module with the parameters of PyTorch's; both work side by side.  Raises ValueError as `replace` does."""
    output: Any = getattr(old, "out_proj", None)
    has_plain_output = type(output) is NonDynamicallyQuantizableLinear
    if type(old) is not nn.MultiheadAttention or not has_plain_output or not is_plain(old):
        kinds = f"a {type(old).__name__} with a {type(output).__name__}"
        raise ValueError(f"replace: nn.MultiheadAttention must have no hooks and no wrappers but is {kinds}")
    return around(old, heads, device=output.weight.device, max_length=max_length)


@torch.no_grad()
def around(old: Any, heads: Heads, *, device: Device, max_length: int = 512) -> MultiheadAttention:
    """Our module over the tensors of PyTorch's, which need not be parameters; what our heads add is on `device`.

    The module has no rows of values for relational heads: the rows that mapped these values map the heads' symbols.

    Raises:
        ValueError: For a subclass with a `forward` of its own, and for heads that do not fit.
    """
    if type(old).forward is not nn.MultiheadAttention.forward:
        raise ValueError(f"replace: a {type(old).__name__} must have the forward of nn.MultiheadAttention")
    # Options that the module keeps under their own names, then all others.
    new = MultiheadAttention(
        old.embed_dim, old.num_heads, dropout=old.dropout, bias=old.in_proj_bias is not None,
        add_bias_kv=old.bias_k is not None, add_zero_attn=old.add_zero_attn, kdim=old.kdim, vdim=old.vdim,
        batch_first=old.batch_first, device=device, dtype=old.out_proj.weight.dtype, heads=heads, max_length=max_length,
    ).train(old.training)  # fmt: skip
    new.out_proj = old.out_proj
    # Of the values only those rows are kept that a group reads; symbols are mapped by the rows of the others.
    width, first_value = old.head_dim, 2 * old.embed_dim
    kept_rows = [slice(0, first_value)]
    groups: Any = new.groups
    for group, size, (first, last) in zip(groups, new.sizes, new.heads_of, strict=True):
        if (size.dim, size.value_dim, size.kv_heads) != (width, width, size.heads) or not {"q", "k"} <= set(size.takes):
            dims = f"{size.dim}, {size.value_dim} and kv_heads {size.kv_heads}"
            raise ValueError(f"replace: heads must have dim, value_dim = {width} and keys of their own, got {dims}")
        rows = slice(first_value + first * width, first_value + last * width)
        if "v" in size.takes:
            kept_rows.append(rows)
        elif group.symbol_dim == old.vdim:
            group.value.weight.copy_(old.in_proj_weight[rows])
            if old.in_proj_bias is not None:
                group.value.bias.copy_(old.in_proj_bias[rows])
        if hasattr(group, "reset_parameters"):
            group.reset_parameters()
    for name in MAPS:
        tensor = getattr(old, name)
        if tensor is not None and new.widths[2] < old.embed_dim:
            joint = torch.cat([tensor[rows] for rows in kept_rows])
            tensor = nn.Parameter(joint, requires_grad=tensor.requires_grad)
        delattr(new, name)
        setattr(new, name, tensor)
    return new
