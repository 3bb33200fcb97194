"""The latent code of `nn.MultiheadAttention` anywhere in a model, before and after `replace`.

Nothing is replaced: each call is repeated by our drop-in over the module's tensors.
"""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from polyhead.compat.torch_mha.module import MultiheadAttention
from polyhead.compat.torch_mha.replace import around
from polyhead.layers.taps import Taps, looking


def capture(model: nn.Module, *inputs: Any, **options: Any) -> list[Taps]:
    """The taps of every call of attention, in order, in one forward pass `model(*inputs, **options)`.

    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> taps = capture(torch.nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16))
    >>> [(layer.name, *layer.groups[0].q.shape) for layer in taps]
    [('layers.0.self_attn', 3, 5, 4, 4), ('layers.1.self_attn', 3, 5, 4, 4)]

    Calls are those of `nn.MultiheadAttention` (self- or cross-attention) and of our module in its place.  The pass has
    no dropout and no gradients.  `x` is the query, and `context` the tensor from which values are computed.  During the
    pass PyTorch's fused encoder is switched off in this process, because it calls no attention module.

    Raises:
        ValueError: If no attention was called, if one computes something of its own, or if one has keys without inputs
            (add_bias_kv, add_zero_attn).
    """
    taps: list[Taps] = []

    def repeat(name: str, module: Any, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        twin = module if isinstance(module, MultiheadAttention) else around(module, None, device="meta")
        twin.forward(*args, **{**kwargs, "taps": taps})
        taps.append(replace(taps.pop(), name=name))

    with contextlib.ExitStack() as stack, looking(model), torch.compiler.set_stance("force_eager"):
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            if isinstance(module, (nn.MultiheadAttention, MultiheadAttention)):
                stack.enter_context(module.register_forward_hook(partial(repeat, name), with_kwargs=True))
        model(*inputs, **options)
    if not taps:
        raise ValueError(f"capture: {type(model).__name__} called no nn.MultiheadAttention")
    return taps
