"""The latent code of `nn.MultiheadAttention` anywhere in a model: its calls are recorded, nothing is replaced.

    taps = capture(nn.TransformerEncoder(layer, 2), x)          one Taps per call, in order
    codes(taps[0], -1, -1)                                      polyhead.analysis reads them like our own

q, k and v are recomputed from the arguments of each call by our drop-in, with the module's tensors.  `key_padding_mask`
and `attn_mask` become our mask and bias.  A model can be read before and after `replace`.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.compat.torch_mha.module import SEPARATE, MultiheadAttention, batch_first, projections
from polyhead.layers.heads.functions import attended
from polyhead.layers.projection import affine, out_weight, widths_of
from polyhead.layers.taps import GroupTaps, Taps, looking, tapped
from polyhead.ops.call import AttentionCall

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def capture(model: nn.Module, *inputs: Any, **options: Any) -> list[Taps]:
    """One forward pass `model(*inputs, **options)`, without dropout or gradients: the taps of every call of an
    `nn.MultiheadAttention` (self- or cross-attention) and of our module in its place, in order.

    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> taps = capture(torch.nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16))
    >>> [(layer.name, *layer.groups[0].q.shape) for layer in taps]
    [('layers.0.self_attn', 3, 5, 4, 4), ('layers.1.self_attn', 3, 5, 4, 4)]

    `x` is the query, and `context` the tensor from which values are computed.  During the call PyTorch's fused encoder
    is switched off in this process, because it calls no attention module.

    Raises ValueError if no attention was called, or if one has keys without inputs (add_bias_kv, add_zero_attn).
    """
    taps: list[Taps] = []
    names: dict[nn.Module, str] = {}

    def record(module: Any, args: tuple, kwargs: dict[str, Any], result: tuple[Tensor, Tensor | None]) -> None:
        call = SIGNATURE.bind(module, *args, **kwargs).arguments
        is_ours = isinstance(module, MultiheadAttention)
        if not is_ours:
            call["is_causal"] = False  # only a hint about attn_mask, which is read
        recorded = _taps(module if is_ours else _as_ours(module), call)
        output = batch_first(module, result[0])
        taps.append(replace(_detached(recorded), output=output, name=names[module]))

    was_fused = torch.backends.mha.get_fastpath_enabled()
    hooks = []
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            if isinstance(module, (nn.MultiheadAttention, MultiheadAttention)):
                _check(name, module)
                names[module] = name
                hooks.append(module.register_forward_hook(record, with_kwargs=True))
        with looking(model):
            model(*inputs, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fused)
        for hook in hooks:
            hook.remove()
    if not taps:
        raise ValueError(f"capture: {type(model).__name__} called none of {len(hooks)} nn.MultiheadAttention")
    return taps


def _check(name: str, module: Any) -> None:
    layer, kind = f"capture: {name or type(module).__name__}", type(module)
    for option, is_set in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if is_set:
            raise ValueError(f"{layer} must have keys that its inputs make but has {option}=True")
    if isinstance(module, nn.MultiheadAttention) and kind.forward is not nn.MultiheadAttention.forward:
        raise ValueError(f"{layer} must run nn.MultiheadAttention.forward but {kind.__name__} has its own")


def _as_ours(module: nn.MultiheadAttention) -> MultiheadAttention:
    """Our drop-in over the tensors of PyTorch's module, which need not be parameters (parametrised, adapted)."""
    twin = MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        device="meta",
    )
    twin.out_proj = module.out_proj
    for name in (*SEPARATE, "in_proj_weight", "in_proj_bias"):
        delattr(twin, name)
        vars(twin)[name] = getattr(module, name)
    return twin


def _taps(module: MultiheadAttention, call: dict[str, Any]) -> Taps:
    """The taps of a call of our drop-in."""
    x, context, calls, _ = module.read(
        call["query"],
        call["key"],
        call["value"],
        call.get("key_padding_mask"),
        call.get("attn_mask"),
        is_causal=call.get("is_causal", False),
        need_weights=call.get("need_weights", True),
    )
    groups = tuple(_detached(_group_taps(module, i, group_call)) for i, group_call in enumerate(calls))
    return Taps(x=x, context=context, output=None, b_out=affine(module.out_proj)[1], groups=groups)


def _group_taps(module: MultiheadAttention, i: int, call: AttentionCall) -> GroupTaps:
    group, size = module.groups[i], module.sizes[i]
    w_value = b_value = None
    if "v" in size.takes:
        weights, biases = projections(module, widths_of(module.sizes))
        counts = [other.widths[2] for other in module.sizes]
        split = (size.kv_heads, size.value_dim)
        w_value = weights[2].split(counts)[i].unflatten(0, split)
        if biases[2] is not None:
            b_value = biases[2].split(counts)[i].unflatten(0, split)
    return tapped(
        group,
        call,
        attended(group, call),
        mask=call.mask,
        causal=call.causal,
        scale=size.dim**-0.5,
        w_value=w_value,
        b_value=b_value,
        w_out=out_weight(module.out_proj, module.sizes, i),
    )


def _detached(taps: Any) -> Any:
    """Taps without the parameters' gradients."""
    return replace(taps, **{name: x.detach() for name, x in vars(taps).items() if isinstance(x, Tensor)})
