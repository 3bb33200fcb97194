"""Step-by-step decoding with PyTorch's layers: our attention modules in them share a cache.

torch_mha.replace(decoder, heads)                 an nn.TransformerDecoder, or causal nn.TransformerEncoder layers
with torch_mha.cached(decoder) as cache:
    y = decoder(prompt, memory)                   fills the cache
    y = decoder(new, memory)                      new tokens only
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from polyhead.compat.torch_mha.module import MultiheadAttention
from polyhead.layers.cache import Cache, whole

Output = TypeVar("Output")


@contextlib.contextmanager
def cached(model: nn.Module, cache: Cache | None = None) -> Iterator[Cache]:
    """Within this block every call of `model` continues the sequences in the cache; it gets their new tokens only.

    >>> from polyhead.compat.torch_mha import replace
    >>> layer = torch.nn.TransformerDecoderLayer(16, 4, batch_first=True)
    >>> decoder = torch.nn.TransformerDecoder(layer, 2).eval()
    >>> replace(decoder, [Softmax(2), Hyla(2)])
    4
    >>> memory = torch.randn(3, 7, 16)
    >>> with cached(decoder) as cache:
    ...     y = decoder(torch.randn(3, 5, 16), memory)     # the prompt
    ...     y = decoder(torch.randn(3, 1, 16), memory)     # the next token
    >>> cache.length
    6

    `cache`: one that an earlier block returned.  Self-attention is causal, whether a mask says so or not; other masks
    have one column for each token so far.  Positions are the caller's: those of new tokens begin at `cache.length`.
    Attention is self-attention if query and key are one tensor, two views of the same memory or equal copies; any other
    is cross-attention, whose keys and values are computed in the first call.  Compiled code knows one tensor only, not
    views and copies.  A call of `model` that is interrupted adds no tokens.

    Raises ValueError for a model without our attention modules or with one of PyTorch's, for one with an encoder beside
    its decoder, within another such block, and for a cache of another number of modules; and a call, if a module is
    called twice in it, is once self- and once cross-attention, or gets another context than in its first call.
    """
    found = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    parts = [type(module) for module in model.modules()]
    who = f"cached: a model of replaced attention was wanted but {type(model).__name__}"
    if nn.MultiheadAttention in parts or not found:
        raise ValueError(f"{who} holds {'nn.MultiheadAttention' if nn.MultiheadAttention in parts else 'none'}")
    if nn.TransformerEncoder in parts and nn.TransformerDecoder in parts:
        raise ValueError(f"cached: a decoder was wanted but {type(model).__name__} has an encoder: take its decoder")
    if any(module.memory is not None for module in found):
        raise ValueError(f"cached: {type(model).__name__} has a cache already")
    cache = Cache(len(found)) if cache is None else cache
    if len(cache) != len(found):
        raise ValueError(f"cached: a cache of {len(found)} attention modules was wanted but one of {len(cache)} came")
    before = vars(model).get("forward")
    try:
        for module, memory in zip(found, cache, strict=True):
            module.memory = memory
        # A partial, as it can be copied with the model.
        vars(model)["forward"] = functools.partial(_whole_call, cache, found, model.forward)
        yield cache
    finally:
        for module in found:
            module.memory = None
        vars(model).pop("forward", None)
        if before is not None:
            vars(model)["forward"] = before


def _whole_call(
    cache: Cache,
    modules: Sequence[MultiheadAttention],
    forward: Callable[..., Output],
    *args: object,
    **kwargs: object,
) -> Output:
    """A call of the model, which adds its tokens to all entries of the cache or, if it is interrupted, to none."""
    seen = () if torch.compiler.is_compiling() else modules
    try:
        for module in seen:
            vars(module)["called"] = False
        with whole(cache):
            return forward(*args, **kwargs)
    finally:
        for module in seen:
            vars(module)["called"] = None
