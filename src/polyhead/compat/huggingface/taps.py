"""Latent codes of Hugging Face models that call their attention through the interface of transformers."""

import contextlib
import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from polyhead.compat.huggingface.attention import SOFTMAX, attend
from polyhead.compat.huggingface.calls import CHECKED, PREFIX, mask
from polyhead.layers.call import LayerLimits
from polyhead.layers.heads.functions import code_with
from polyhead.layers.taps import Taps, looking, tapped

NAME = "polyhead"
"""The name of our function in the interface; it is not saved in a configuration."""

_RECORD: ContextVar[Callable[..., Any]] = ContextVar("record")


def capture(model: nn.Module, *inputs: Any, **options: Any) -> list[Taps]:
    """The taps of every call of attention, in order, in one forward pass `model(*inputs, **options)`.

    >>> import transformers
    >>> gpt = transformers.GPT2Model(transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4))
    >>> taps = capture(gpt, torch.randint(100, (3, 7)))
    >>> [(layer.name, *layer.groups[0].q.shape) for layer in taps]
    [('h.0.attn', 3, 7, 4, 8), ('h.1.attn', 3, 7, 4, 8)]

    The pass has no dropout and no gradients, and leaves the model as before.  q and k are as they enter the scores,
    after rotation and norms; q is multiplied by a scale of the model's own.  transformers' functions do not get the
    inputs, outputs and projections of layers, which are None.  A query without a visible key has the code 0.

    Raises:
        ValueError: If the model does not use the interface, or if its attention is not plain softmax attention.
    """
    names = {module: name for name, module in model.named_modules()}
    taps: list[Taps] = []

    def heads(name: str, q: Tensor, k: Tensor, v: Tensor, *, limits: LayerLimits, relational: object) -> Tensor:
        call = limits.call({"q": q, "k": k, "v": v}, 0, q.shape[2])
        group = tapped(SOFTMAX, call, SOFTMAX(call), scale=q.shape[-1] ** -0.5, w_value=None, b_value=None, w_out=None)
        # The soft cap and the sinks are those of the model.
        extras = {"softcap": call.softcap, "sinks": call.sinks}
        group = dataclasses.replace(group, coder=partial(code_with, group.coder, extras))
        taps.append(Taps(x=None, context=None, output=None, b_out=None, groups=(group,), name=name))
        return group.output

    def record(module: nn.Module, *tensors: Any, **options: Any) -> Any:
        return attend(partial(heads, names.get(module, type(module).__name__)), module, *tensors, **options)

    AttentionInterface.register(NAME, lambda *tensors, **options: _RECORD.get()(*tensors, **options))
    AttentionMaskInterface.register(NAME, mask)
    with contextlib.ExitStack() as stack, torch.inference_mode(False), looking(model):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_RECORD.reset, _RECORD.set(record))
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if not hasattr(config, "_attn_implementation_internal"):
                continue
            before, kind = config._attn_implementation_internal, type(module).__name__
            if str(before).startswith(PREFIX):  # their code is not that of softmax attention
                raise ValueError(f"capture: {kind} must run softmax attention but its heads are {before}")
            # Without a mask our function is causal where SDPA is; other models may mean something else.
            if isinstance(module, PreTrainedModel) and not module._supports_sdpa and config.model_type not in CHECKED:
                raise ValueError(f"capture: {kind} must support SDPA (_supports_sdpa), which says what is causal")
            # Modules share configurations: the first change is undone last.
            stack.callback(setattr, config, "_attn_implementation_internal", before)
            config._attn_implementation_internal = NAME
        model(*inputs, **options)
    # A model that computes attention itself called nothing of ours; empty taps would look like a result.
    if not taps:
        name = type(model).__name__
        raise ValueError(f"capture: {name} must call its attention through transformers' AttentionInterface")
    return taps
