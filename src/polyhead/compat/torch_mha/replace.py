"""Replace every `nn.MultiheadAttention` of a model by ours; weights are kept."""

import torch
from torch import nn

from polyhead.compat.heads import Heads, is_plain
from polyhead.compat.torch_mha.module import MultiheadAttention, projections
from polyhead.layers.heads.symbolic import SymbolGroup

OUTPUT_CLASS = type(nn.MultiheadAttention(1, 1).out_proj)


def replace(model: nn.Module, heads: Heads = None, *, max_length: int = 512) -> int:
    """Replace every `nn.MultiheadAttention` in `model` by ours, with the same weights; return how many.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    >>> replace(model, [Softmax(2), Hyla(2)])
    2

    Parameters are the same objects, so an optimiser still updates them.  Relational heads map their symbols by the rows
    of values, which are no longer used: the joint matrix is copied without them.

    Raises ValueError, and replaces nothing, for heads of other widths or another number, add_bias_kv, add_zero_attn, a
    subclass (it may compute something else), a module with hooks or wrappers (PEFT, a parametrised output: they would
    be lost), and a model without such a module.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    if model in modules:
        raise ValueError("replace: the model is an nn.MultiheadAttention itself: use drop_in")
    if not modules:
        replaced = sum(isinstance(module, MultiheadAttention) for module in model.modules())
        raise ValueError(f"replace: {type(model).__name__} has no nn.MultiheadAttention left ({replaced} are replaced)")
    for parent in model.modules():
        if isinstance(getattr(parent, "base_layer", None), nn.MultiheadAttention):  # PEFT reads its weights by name
            raise ValueError(
                f"replace: nn.MultiheadAttention was wanted but a {type(parent).__name__} of PEFT holds it"
            )

    # All are built before any is put in, so an error changes nothing.
    replacements = {module: drop_in(module, heads, max_length=max_length) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])
        # Nested tensors exist for the fused kernel, which would not call our module.
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return len(modules)


@torch.no_grad()
def drop_in(old: nn.Module, heads: Heads = None, *, max_length: int = 512) -> MultiheadAttention:
    """Return our module with the weights of PyTorch's; both share the parameters and can be used side by side.

    Raises ValueError as `replace` does.
    """
    if type(old) is not nn.MultiheadAttention:
        name = type(old).__name__
        if isinstance(old, nn.MultiheadAttention):
            name = f"its subclass {name}"
        raise ValueError(f"replace: nn.MultiheadAttention was wanted but {name} came")
    output = old.out_proj
    if not is_plain(old) or type(output) is not OUTPUT_CLASS or output._forward_pre_hooks:
        raise ValueError(
            "replace: nn.MultiheadAttention must be as PyTorch makes it, without hooks and wrappers, "
            f"got one with a {type(output).__name__}"
        )
    new = MultiheadAttention(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout,
        bias=old.in_proj_bias is not None,
        add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device=output.weight.device,
        dtype=output.weight.dtype,
        heads=heads,
        max_length=max_length,
    ).train(old.training)
    width = old.head_dim
    for size in new.sizes:
        if (size.dim, size.value_dim, size.kv_heads) != (width, width, size.heads) or not {"q", "k"} <= set(size.takes):
            raise ValueError(
                f"replace: heads must have dim, value_dim = {width} and keys of their own "
                f"but {size.dim}, {size.value_dim} and kv_heads {size.kv_heads} came"
            )
    _share_weights(new, old)
    return new


def _share_weights(new: MultiheadAttention, old: nn.MultiheadAttention) -> None:
    """Give `new` the parameters of `old`, without the rows of values that relational heads do not read."""
    new.out_proj.weight, new.out_proj.bias = old.out_proj.weight, old.out_proj.bias
    is_read = [torch.ones(2 * old.embed_dim, dtype=torch.bool, device="cpu")]
    for size in new.sizes:
        is_read.append(torch.full((size.heads * old.head_dim,), "v" in size.takes, device="cpu"))
    rows = torch.cat(is_read)
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        parameter = getattr(old, name)
        if parameter is not None and not rows.all():
            indices = rows.nonzero()[:, 0].to(parameter.device)
            parameter = nn.Parameter(parameter[indices], requires_grad=parameter.requires_grad)
        setattr(new, name, parameter)

    # Symbols are mapped by the rows that mapped the values of these heads.
    weights, biases = projections(old, old.embed_dim)
    value_weight, value_bias = weights[2], biases[2]
    for group, (first, last) in zip(new.groups, new.heads_of, strict=True):
        if not isinstance(group, SymbolGroup):
            continue
        value_rows = slice(first * old.head_dim, last * old.head_dim)
        if group.symbol_dim == value_weight.shape[1]:
            group.value.weight.copy_(value_weight[value_rows])
            if group.value.bias is not None and value_bias is not None:
                group.value.bias.copy_(value_bias[value_rows])
        if hasattr(group, "reset_parameters"):
            group.reset_parameters()  # type: ignore[operator]
