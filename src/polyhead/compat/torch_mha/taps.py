"""The latent code of `nn.MultiheadAttention` anywhere in a model: its calls are recorded, nothing is replaced.

    taps = capture(nn.TransformerEncoder(layer, 2), x)          one Taps per call, in order
    codes(taps[0], -1, -1)                                      polyhead.analysis reads them like our own

q, k and v are recomputed from the arguments of each call and the module's weights.  `key_padding_mask` and `attn_mask`
are True at *masked* pairs or are added to the scores; they become our mask and bias.  Calls of our drop-in module are
recorded in the same way, so a model can be read before and after `replace`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.compat import timm
from polyhead.compat.foreign import limits, softmax_group
from polyhead.compat.torch_mha.module import MultiheadAttention, projections, sdpa_masks
from polyhead.layers.heads.functions import attended
from polyhead.layers.projection import affine, out_weight
from polyhead.layers.taps import GroupTaps, Taps, looking, tapped
from polyhead.ops.call import AttentionCall

_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_PLAIN, _ROPE = (inspect.signature(kind.forward) for kind in (timm.Attention, timm.AttentionRope))


def capture(model: nn.Module, *inputs: Any, **options: Any) -> list[Taps]:
    """One forward pass `model(*inputs, **options)`, without dropout or gradients: the taps of every call of an
    `nn.MultiheadAttention` (self- or cross-attention) and of our modules in its place or in that of timm's, in order.

    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> taps = capture(torch.nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16))
    >>> [(layer.name, *layer.q.shape) for layer in taps]
    [('layers.0.self_attn', 3, 5, 4, 4), ('layers.1.self_attn', 3, 5, 4, 4)]

    `x` is the query, and `context` the tensor from which values are computed.  Afterwards hooks are removed and modes
    are restored.  During the call PyTorch's fused encoder is switched off in this process, because it calls no
    attention module.

    Raises ValueError if no attention was called, or if one has keys without inputs (add_bias_kv, add_zero_attn).
    """
    found: list[Taps] = []
    fused = torch.backends.mha.get_fastpath_enabled()
    hooks = []
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            if isinstance(module, (nn.MultiheadAttention, MultiheadAttention, timm.Attention)):
                _check(name, module)
                hooks.append(module.register_forward_hook(_hook(found, name), with_kwargs=True))
        with looking(model):
            model(*inputs, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for hook in hooks:
            hook.remove()
    if not found:
        raise ValueError(f"capture: {type(model).__name__} called none of {len(hooks)} nn.MultiheadAttention")
    return found


def _check(name: str, module: nn.Module) -> None:
    who = f"capture: {name or type(module).__name__}"
    if isinstance(module, MultiheadAttention) and module.memory is not None:
        raise ValueError(f"{who} must have no cache: capture the whole sequence, outside of cached")
    if not isinstance(module, nn.MultiheadAttention):
        return
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ValueError(f"{who} must have keys that its inputs make but has {option}=True")
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise ValueError(f"{who} must run nn.MultiheadAttention.forward but {type(module).__name__} has its own")


def _hook(found: list[Taps], name: str) -> Callable[..., None]:
    def watch(module: Any, args: tuple, kwargs: dict[str, Any], result: Tensor | tuple) -> None:
        rope = isinstance(module, timm.AttentionRope)
        signature = _SIGNATURE if not isinstance(module, timm.Attention) else _ROPE if rope else _PLAIN
        call = signature.bind(module, *args, **kwargs).arguments
        if isinstance(module, timm.Attention):
            assert isinstance(result, Tensor)
            x, masks = call["x"], (call.get("attn_mask"), call.get("is_causal", False))
            taps = _taps_of_ours(module, x, x, module.calls(x, call.get("rope"), *masks))
        else:
            taps = _taps_of_call(module, call) if isinstance(module, MultiheadAttention) else _taps(module, call)
            result = _batch_first(module, result[0])
        found.append(replace(taps, output=result, name=name))

    return watch


def _taps(module: nn.MultiheadAttention, call: dict[str, Any]) -> Taps:
    inputs = [_batch_first(module, call[part]) for part in ("query", "key", "value")]
    weights, biases = projections(module, module.embed_dim)
    heads, split = module.num_heads, (module.num_heads, module.head_dim)
    q, k, v = (F.linear(*part).unflatten(-1, split) for part in zip(inputs, weights, biases, strict=True))
    s = k.shape[1]
    given = sdpa_masks(call.get("key_padding_mask"), call.get("attn_mask"), heads, q, s)
    bias, mask = limits(given, q.shape[1], s, q.dtype)  # is_causal is only a hint about attn_mask
    b_value = _detached(biases[2])
    group = softmax_group(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        w_value=weights[2].detach().unflatten(0, split),
        b_value=None if b_value is None else b_value.unflatten(0, split),
        w_out=module.out_proj.weight.detach().unflatten(1, split).transpose(0, 1),
    )
    b_out = _detached(module.out_proj.bias)
    return Taps(x=inputs[0], context=inputs[2], output=None, b_out=b_out, groups=(group,))


def _taps_of_call(module: MultiheadAttention, call: dict[str, Any]) -> Taps:
    masks = call.get("key_padding_mask"), call.get("attn_mask"), call.get("is_causal", False)
    weights = call.get("need_weights", True)
    x, context, calls, _ = module.read(call["query"], call["key"], call["value"], *masks, weights=weights)
    return _taps_of_ours(module, x, context, calls)


def _taps_of_ours(
    module: MultiheadAttention | timm.Attention, x: Tensor, context: Tensor, calls: Sequence[AttentionCall]
) -> Taps:
    out = module.output()
    groups = tuple(_group(module, i, own, out) for i, own in enumerate(calls))
    b_out = None if out is None else _detached(affine(out)[1])
    return Taps(x=x, context=context, output=None, b_out=b_out, groups=groups)


def _group(module: MultiheadAttention | timm.Attention, i: int, own: AttentionCall, out: nn.Module | None) -> GroupTaps:
    group: Any = module.groups[i]
    w_value, b_value = module.values_of(i)
    taps = tapped(
        group,
        own,
        attended(group, own),
        mask=own.mask,
        causal=own.causal,
        scale=module.sizes[i].dim ** -0.5,
        w_value=w_value,
        b_value=b_value,
        w_out=None if out is None else out_weight(out, module.sizes, i).detach(),
    )
    deep, related = _detached(taps.value_weight), _detached(taps.relation_weight)
    return replace(taps, value_weight=deep, relation_weight=related)


def _detached(parameter: Tensor | None) -> Tensor | None:
    """The values of a parameter."""
    return None if parameter is None else parameter.detach()


def _batch_first(module: nn.MultiheadAttention | MultiheadAttention, x: Tensor) -> Tensor:
    """(b t m) from the module's input or output, which may be (t b m), or (t m) for one sequence."""
    if x.ndim == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)
