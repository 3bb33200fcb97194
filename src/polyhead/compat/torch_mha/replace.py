"""Replace the attention modules of a model: `nn.MultiheadAttention`, and timm's; weights are kept."""

import torch
from torch import Tensor, nn

from polyhead.compat import timm
from polyhead.compat.heads import Heads, OurHeads, plain
from polyhead.compat.torch_mha.module import MultiheadAttention, projections

_OUT = type(nn.MultiheadAttention(1, 1).out_proj)
OTHERWISE = {
    "timm": "of timm, replace takes Attention, AttentionRope and EvaAttention",
    "transformers": "use polyhead.compat.huggingface.swap_heads",
    "diffusers": "set an attention processor, as examples/diffusers_processor.py does",
    "x_transformers": "its layers have options that ours lack: build the model as polyhead.Transformer",
}
"""What to do with the attention of other libraries."""


def replace(model: nn.Module, heads: Heads = None, *, max_length: int = 512) -> int:
    """Replace every `nn.MultiheadAttention` in `model` by ours, with the same weights, and timm's attention modules;
    returns how many.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    >>> replace(model, [Softmax(2), Hyla(2)])
    2

    Parameters are the same objects, so an optimiser still updates them.  Relational heads map their symbols by the rows
    of values, which are no longer used: timm's joint matrix keeps them, PyTorch's is copied without them.  PyTorch's
    encoders no longer nest padded tensors, which only their fused kernel supports.  Of timm, `Attention`,
    `AttentionRope` and `EvaAttention` are replaced; its other modules stay.

    Raises ValueError, and replaces nothing, for heads of other widths or another number, add_bias_kv, add_zero_attn, a
    subclass (it may compute something else), a module with hooks or wrappers (PEFT, a parametrised output: they would
    be lost), and a model without such a module.
    """
    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention) or timm.is_attention(m)]
    if not found or model in found:
        what = "is one itself: use drop_in" if found else _without(model)
        raise ValueError(
            f"replace: a model that holds nn.MultiheadAttention was wanted but {type(model).__name__} {what}"
        )
    for parent in model.modules():
        if isinstance(getattr(parent, "base_layer", None), nn.MultiheadAttention):  # PEFT reads its weights by name
            raise ValueError(
                f"replace: nn.MultiheadAttention was wanted but a {type(parent).__name__} of PEFT holds it"
            )
    new: dict[nn.Module, OurHeads] = {old: drop_in(old, heads, max_length=max_length) for old in found}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return len(found)


def _without(model: nn.Module) -> str:
    """Why a model has no module that can be replaced, as the end of an error message."""
    ours = sum(isinstance(m, OurHeads) for m in model.modules())
    if ours:
        return f"holds none: {ours} are replaced already"
    for module in model.modules():
        package, name = type(module).__module__.partition(".")[0], type(module).__name__
        if package in OTHERWISE and ("Attention" in name or "Attn" in name) and "Block" not in name:
            return f"holds {timm.name_of(module)}: {OTHERWISE[package]}"
    return "holds none"


def drop_in(old: nn.Module, heads: Heads = None, *, max_length: int = 512) -> OurHeads:
    """Our module with the weights of one of PyTorch's or of timm's; both share the parameters and can be used side by
    side.

    Raises ValueError as `replace` does.
    """
    if isinstance(old, nn.MultiheadAttention):
        return _mha(old, heads, max_length)
    return timm.drop_in(old, heads, max_length=max_length)


@torch.no_grad()
def _mha(old: nn.MultiheadAttention, heads: Heads, max_length: int) -> MultiheadAttention:
    if type(old) is not nn.MultiheadAttention:
        raise ValueError(f"replace: nn.MultiheadAttention was wanted but its subclass {type(old).__name__} came")
    out = old.out_proj
    if not plain(old) or type(out) is not _OUT or out._forward_pre_hooks:
        what = type(out).__name__ + (" and hooks" if type(out) is _OUT else "")
        raise ValueError(f"replace: nn.MultiheadAttention as PyTorch makes it was wanted but one with a {what} came")
    where, has_bias = out.weight, old.in_proj_bias is not None
    new = MultiheadAttention(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout,
        bias=has_bias,
        add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device=where.device,
        dtype=where.dtype,
        heads=heads,
        max_length=max_length,
    ).train(old.training)
    new.check_widths(old.head_dim)
    _take_weights(new, old)
    return new


def _take_weights(new: MultiheadAttention, old: nn.MultiheadAttention) -> None:
    new.out_proj.weight, new.out_proj.bias = old.out_proj.weight, old.out_proj.bias
    e, d = old.embed_dim, old.head_dim
    own = torch.cat([torch.full((size.heads * d,), "v" in size.takes, device="cpu") for size in new.sizes])
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        parameter: Tensor | None = getattr(old, name)
        if parameter is not None and not own.all():  # the weights are joint
            rows = torch.cat((torch.ones(2 * e, dtype=torch.bool, device="cpu"), own)).nonzero()[:, 0]
            parameter = nn.Parameter(parameter[rows.to(parameter.device)], requires_grad=parameter.requires_grad)
        setattr(new, name, parameter)
    weights, biases = projections(old, e)
    new.map_symbols(weights[2], biases[2])
