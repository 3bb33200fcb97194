"""Which attention layers of a transformers model compute our heads, and the refusal of models that may not.

`attn_implementation` is a string, which an architecture that computes attention itself ignores: it would remain softmax
attention, without a word.  So a name of ours is taken by the types in `CHECKED` alone.
"""

import contextlib
import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from polyhead.layers.taps import looking
from polyhead.ops.readable import is_readable

PREFIX = "polyhead_"
"""The names of our heads as `attn_implementation` begin with it, and so do model types that hold them."""

BY_LAYER = "polyhead_heads"
"""The `attn_implementation` of models whose configuration has the heads of each layer."""

TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "smollm3", "starcoder2", "cohere")
"""Model types for which `register` makes classes.  Call `register("phi")` for others, also before loading one."""

CHECKED = {
    *(*TYPES, "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "gemma2", "gemma3_text", "gpt_oss", "cohere2"),
    *("stablelm", "nemotron", "glm", "glm4", "helium", "ernie4_5", "phi", "phi3", "gpt2", "gpt_neox", "gpt_bigcode"),
    *("opt", "biogpt", "deepseek_v3", "bert", "roberta", "distilbert", "electra", "modernbert", "albert", "t5"),
    *("bart", "marian", "pegasus", "vit", "dinov2", "deit"),
}
"""Model types that call the attention interface in every layer.  After adding one, compare it with eager attention."""

CALLED: ContextVar[dict[nn.Module, str]] = ContextVar("called")
"""What computes the attention of each module, for `verify`."""


def check_type(model: str, model_type: str, name: object) -> None:
    """Raise ValueError if `name` is one of our heads, and models of this type are not known to call them."""
    if str(name).startswith(PREFIX) and model_type.removeprefix(PREFIX) not in CHECKED:
        raise ValueError(
            f"polyhead: {model} must call its attention through transformers' AttentionInterface for {name!r}, which "
            f"is not known of the type {model_type!r} (huggingface.CHECKED.add, then compare with eager attention)"
        )


_method: Any = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_method)
def _checked(self: PreTrainedModel, requested_attention: Any = None, *args: Any, **options: Any) -> Any:
    """transformers asks this when a model gets the name of an implementation."""
    check_type(type(self).__name__, self.config.model_type, requested_attention)
    if getattr(self.config, "polyhead_heads", None) and not type(self.config).model_type.startswith(PREFIX):
        raise ValueError(f"polyhead: {type(self).__name__} must not read heads of layers: use AutoModelForCausalLM")
    return _method(self, requested_attention, *args, **options)


PreTrainedModel.get_correct_attn_implementation = _checked  # type: ignore[method-assign]


def mask(*sizes: Any, config: Any, **options: Any) -> Tensor | None:
    """The mask that architectures pass to our function: that of SDPA."""
    # A configuration may get a name of ours behind the model's back.
    check_type(type(config).__name__, config.model_type, config._attn_implementation)
    # Recorded code has no numbers of the padding yet, so the mask must be made whatever they are.
    padding = options.get("attention_mask")
    if padding is not None and not is_readable(padding):
        options["allow_is_causal_skip"] = False  # transformers would read the padding under vmap and in make_fx
    return sdpa_mask(*sizes, config=config, **options)


def verify(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, str]:
    """Run `model(*inputs, **options)`; return the heads of ours that each attention layer has called, by its name.

    >>> import transformers
    >>> from polyhead.compat.huggingface import swap_heads
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> verify(swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)]))
    {'model.layers.0.self_attn': 'polyhead_softmax', 'model.layers.1.self_attn': 'Softmax(2), Hyla(2)'}

    A layer that is not named computed attention of its own.  Without inputs the model reads four tokens.  Gradients and
    dropout are off, and a compiled model runs uncompiled.

    Raises:
        ValueError: If heads of the configuration, or of the model's `attn_implementation`, were not called.
    """
    if not inputs and not options:
        inputs = (torch.arange(1, 5, device=next(model.parameters()).device)[None],)
    called: dict[nn.Module, str] = {}
    with contextlib.ExitStack() as stack, looking(model), torch.compiler.set_stance("force_eager"):
        stack.callback(CALLED.reset, CALLED.set(called))
        model(*inputs, **options)
    # torch.compile wraps the model; names of layers are those of the model inside.
    model = getattr(model, "_orig_mod", model)
    kind, config = type(model).__name__, getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if str(name).startswith(PREFIX) and not called:
        raise ValueError(f"polyhead: {kind} has {name!r} but none of its layers calls it")
    indices = {getattr(module, "layer_idx", None) for module in called}
    for i, heads in enumerate(getattr(config, "polyhead_heads", None) or ()):
        if heads is not None and i not in indices:
            raise ValueError(f"polyhead: layer {i} of {kind} must call the heads of its configuration")
    return {name: called[module] for name, module in model.named_modules() if module in called}
