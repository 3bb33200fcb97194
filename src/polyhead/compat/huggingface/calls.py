"""Which attention layers of a transformers model compute our heads, and the refusal of models that may not.

`attn_implementation` is a string in a configuration.  An architecture that computes attention itself ignores it: it
would remain softmax attention, without a word.  So a name of ours is taken by the types in `CHECKED` alone.
"""

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from polyhead.layers.taps import looking

PREFIX = "polyhead_"
"""The names of our heads as `attn_implementation` begin with it, and so do model types that hold them."""

BY_LAYER = "polyhead_heads"
"""The `attn_implementation` of models whose configuration has the heads of each layer."""

CHECKED = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2"),
    *("gemma3_text", "gpt_oss", "olmo2", "granite", "smollm3", "starcoder2", "cohere", "cohere2", "stablelm"),
    *("nemotron", "glm", "glm4", "helium", "ernie4_5", "phi", "phi3", "gpt2", "gpt_neox", "gpt_bigcode", "opt"),
    *("biogpt", "deepseek_v3", "bert", "roberta", "distilbert", "electra", "modernbert", "albert", "t5", "bart"),
    *("marian", "pegasus", "vit", "dinov2", "deit"),
}
"""Model types that call the attention interface in every layer.  Add others after a comparison with eager attention."""

ITS_OWN = "its own"
"""The attention of a layer that does not call our function."""

_CALLED: ContextVar[dict[nn.Module, str]] = ContextVar("called")


def note(module: nn.Module, heads: str) -> None:
    """Record for `verify` what computes the attention of a module."""
    if not torch.compiler.is_compiling():
        _CALLED.get({})[module] = heads


def is_polyhead(name: object) -> TypeGuard[str]:
    """Whether an `attn_implementation` is one of our heads."""
    return isinstance(name, str) and name.startswith(PREFIX)


def check_type(model: str, model_type: str, name: str) -> None:
    """Raise ValueError unless models of this type are known to call the implementation `name`."""
    if model_type.removeprefix(PREFIX) not in CHECKED:
        raise ValueError(
            f"polyhead: {model} must call its attention through transformers' AttentionInterface for {name!r}, which "
            f"is not known of the type {model_type!r} (compare it with eager attention, then huggingface.CHECKED.add)"
        )


def guard() -> None:
    """Make transformers ask us when a model gets a name of ours; may be called again."""
    method: Any = PreTrainedModel.get_correct_attn_implementation
    if hasattr(method, "polyhead"):
        return

    @functools.wraps(method)
    def checked(self: PreTrainedModel, requested_attention: Any = None, *args: Any, **options: Any) -> Any:
        if is_polyhead(requested_attention):
            check_type(type(self).__name__, self.config.model_type, requested_attention)
        return method(self, requested_attention, *args, **options)

    checked.polyhead = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def mask(*sizes: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask that architectures pass to our function: that of SDPA."""
    name = getattr(config, "_attn_implementation", None)
    if is_polyhead(name):  # a configuration may get a name of ours behind the model's back
        check_type(type(config).__name__, config.model_type, name)
    return sdpa_mask(*sizes, config=config, **options)


def verify(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, str]:
    """Run `model(*inputs, **options)`; return what computed each attention layer that was called, by its name.

    >>> import transformers
    >>> from polyhead.compat.huggingface import swap_heads
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> verify(swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)]))
    {'model.layers.0.self_attn': 'sdpa', 'model.layers.1.self_attn': 'Softmax(2), Hyla(2)'}

    A layer that did not call our function has "its own" attention.  Without inputs the model reads four tokens.
    Gradients and dropout are off, and a compiled model runs uncompiled.

    Raises ValueError if a layer has heads of ours, by name or in its configuration, but did not call them.
    """
    if not inputs and not options:
        inputs = (torch.arange(1, 5, device=next(model.parameters()).device)[None],)
    called: dict[nn.Module, str] = {}
    hooks = []

    def count(module: nn.Module, *_: Any) -> None:
        called.setdefault(module, ITS_OWN)

    token = _CALLED.set(called)
    try:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                hooks.append(module.register_forward_hook(count))
        with looking(model), torch.compiler.set_stance("force_eager"):
            model(*inputs, **options)
    finally:
        for hook in hooks:
            hook.remove()
        _CALLED.reset(token)
    # torch.compile wraps the model; names of layers are those of the model inside.
    return called_layers(getattr(model, "_orig_mod", model), called)


def called_layers(model: nn.Module, called: Mapping[nn.Module, str]) -> dict[str, str]:
    """What computed the layers that were called.  Raises ValueError if a layer ignored our heads."""
    callers = [module for module in called if called[module] != ITS_OWN]
    config, kind = getattr(model, "config", None), type(model).__name__
    implementation = getattr(config, "_attn_implementation", None)
    if is_polyhead(implementation) and not callers:
        raise ValueError(f"polyhead: {kind} has {implementation!r} but none of its layers calls it")
    indices = {getattr(module, "layer_idx", None) for module in callers}
    for i, heads in enumerate(getattr(config, "polyhead_heads", None) or ()):
        if heads is not None and i not in indices:
            raise ValueError(f"polyhead: layer {i} of {kind} must call the heads of its configuration")
    # A module that contains, or is part of, one that called us is no further layer; nor is a part of another layer.
    covered = {part for module in callers for part in module.modules()}
    layers = {}
    for name, module in model.named_modules():
        if module in callers:
            layers[name] = called[module]
        elif module in called and module not in covered and covered.isdisjoint(module.modules()):
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if is_polyhead(implementation):
                kind = type(module).__name__
                raise ValueError(f"polyhead: {name} ({kind}) must call {implementation!r} but computes it itself")
            layers[name] = ITS_OWN
            covered.update(module.modules())
    return layers
