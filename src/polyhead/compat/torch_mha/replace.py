"""Replace every `nn.MultiheadAttention` in a model by `torch_mha.MultiheadAttention`; weights are kept."""

import torch
from torch import Tensor, nn

from polyhead.compat.torch_mha.module import Heads, MultiheadAttention
from polyhead.layers.heads.groups import SymbolGroup

_OUT = type(nn.MultiheadAttention(1, 1).out_proj)


def replace(model: nn.Module, heads: Heads = None, *, max_length: int = 512) -> int:
    """Replace every `nn.MultiheadAttention` in `model` by ours, with the same weights; returns how many.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    >>> replace(model, [Softmax(2), Hyla(2)])
    2

    Parameters are the same objects, so an optimiser still updates them.  Only for relational heads the joint matrix is
    copied without their rows of values, and their symbols are mapped by those rows.  PyTorch's encoders no longer nest
    padded tensors, which only their fused kernel supports.

    Raises ValueError, and replaces nothing, for heads of other widths or another number, add_bias_kv, add_zero_attn, a
    subclass (it may compute something else), a module with hooks or wrappers (PEFT, a parametrised output: they would
    be lost), and a model without such a module.
    """
    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    if not found or model in found:
        ours = sum(isinstance(m, MultiheadAttention) for m in model.modules())
        left = f"holds none: {ours} are replaced already" if ours else "holds none"
        what = "is one itself: use drop_in" if found else left
        raise ValueError(
            f"replace: a model that holds nn.MultiheadAttention was wanted but {type(model).__name__} {what}"
        )
    for parent in model.modules():
        if isinstance(getattr(parent, "base_layer", None), nn.MultiheadAttention):  # PEFT reads its weights by name
            raise ValueError(
                f"replace: nn.MultiheadAttention was wanted but a {type(parent).__name__} of PEFT holds it"
            )
    new = {old: drop_in(old, heads, max_length=max_length) for old in found}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(parent, name, new[child])
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return len(found)


@torch.no_grad()
def drop_in(old: nn.MultiheadAttention, heads: Heads = None, *, max_length: int = 512) -> MultiheadAttention:
    """Our module with the weights of one of PyTorch's; both share the parameters and can be used side by side.

    Raises ValueError as `replace` does.
    """
    if type(old) is not nn.MultiheadAttention:
        raise ValueError(f"replace: nn.MultiheadAttention was wanted but its subclass {type(old).__name__} came")
    out = old.out_proj
    if old._forward_hooks or old._forward_pre_hooks or type(out) is not _OUT or out._forward_pre_hooks:
        what = f"with a {type(out).__name__} and hooks" if type(out) is _OUT else f"with a {type(out).__name__}"
        raise ValueError(f"replace: nn.MultiheadAttention as PyTorch makes it was wanted but one {what} came")
    where, has_bias = out.weight, old.in_proj_bias is not None
    new = MultiheadAttention(
        *(old.embed_dim, old.num_heads, old.dropout, has_bias, old.bias_k is not None, old.add_zero_attn),
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device=where.device,
        dtype=where.dtype,
        heads=heads,
        max_length=max_length,
    ).train(old.training)
    for size in new.sizes:
        came = (size.dim, size.value_dim, size.kv_heads)
        if came != (old.head_dim, old.head_dim, size.heads) or not {"q", "k"} <= set(size.takes):
            wanted = f"dim, value_dim = {old.head_dim} and keys of their own"
            raise ValueError(f"replace: heads must have {wanted} but {came[0]}, {came[1]} and kv_heads {came[2]} came")
    _take_weights(new, old)
    return new


def _take_weights(new: MultiheadAttention, old: nn.MultiheadAttention) -> None:
    new.out_proj.weight, new.out_proj.bias = old.out_proj.weight, old.out_proj.bias
    e, d = old.embed_dim, old.head_dim
    own = torch.cat([torch.full((size.heads * d,), "v" in size.takes) for size in new.sizes])
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        parameter: Tensor | None = getattr(old, name)
        if parameter is not None and not own.all():  # the weights are joint
            rows = torch.cat((torch.ones(2 * e, dtype=torch.bool), own)).to(parameter.device)
            parameter = nn.Parameter(parameter[rows], requires_grad=parameter.requires_grad)
        setattr(new, name, parameter)
    first = 2 * e
    for group, size in zip(new._groups(), new.sizes, strict=True):
        mine, first = slice(first, first + size.heads * d), first + size.heads * d
        if isinstance(group, SymbolGroup):
            if group.symbol_dim == e:
                group.value.weight.copy_(old.in_proj_weight[mine])
                if group.value.bias is not None:
                    group.value.bias.copy_(old.in_proj_bias[mine])
            if hasattr(group, "reset_parameters"):
                group.reset_parameters()  # type: ignore[operator]
