"""Which attention layers of a transformers model compute our heads, and the refusal of models that cannot.

    verify(model)           a tiny forward pass; for each attention layer, what computed it

`attn_implementation` is a string in a configuration.  An architecture that computes attention itself ignores it: it
would remain softmax attention, without a word.  Such models are refused when the name is chosen.
"""

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from polyhead.compat.huggingface.taps import EAGER, inputs_by_name, is_polyhead
from polyhead.layers.taps import looking
from polyhead.ops.readable import is_readable

BY_LAYER = "polyhead_heads"
"""The `attn_implementation` of models whose configuration has the heads of each layer."""

OWN_ATTENTION = {
    *("bigbird_pegasus", "clap", "deepseek_ocr2", "evolla", "git", "informer", "longt5", "minimax", "pegasus_x"),
    *("pp_formulanet", "sam", "sam_hq", "unlimited_ocr"),
}
"""Folders of transformers.models that use the attention interface in some layers and other code in others."""

STOCK = "sdpa"
"""The attention of a layer that calls our function but has no heads of ours."""


@dataclass
class Calls:
    """The attention calls of one forward pass."""

    heads: dict[nn.Module, str] = field(default_factory=dict)  # of modules that called our function
    modules: set[nn.Module] = field(default_factory=set)  # called modules of a class named ...Attention


_CALLS: ContextVar[Calls | None] = ContextVar("calls", default=None)


def note(module: nn.Module, heads: str) -> None:
    """Record that a layer's attention called our function."""
    if torch.compiler.is_compiling():
        return
    calls = _CALLS.get()
    if calls is not None:
        calls.heads[module] = heads


# -------------------------------------------------------------------------------------------------------------- refusal
def check_model(kind: type, name: str) -> None:
    """Raise ValueError for a model class some of whose attention layers ignore the implementation `name`."""
    if not issubclass(kind, PreTrainedModel):
        return
    # A class is defined in transformers.models.FOLDER.modeling_FOLDER.
    folders = {base.__module__.split(".")[2] for base in kind.__mro__ if base.__module__.count(".") > 2}
    if not kind._can_set_attn_implementation() or folders & OWN_ATTENTION:
        raise ValueError(
            f"polyhead: {kind.__name__} must call its attention through transformers' AttentionInterface for {name!r} "
            "but computes it itself"
        )


def guard() -> None:
    """Make transformers ask us when a model gets a name of ours; may be called again."""
    method: Any = PreTrainedModel.get_correct_attn_implementation
    if hasattr(method, "polyhead"):
        return

    @functools.wraps(method)
    def checked(self: PreTrainedModel, requested_attention: Any = None, *args: Any, **options: Any) -> Any:
        if is_polyhead(requested_attention):
            check_model(type(self), requested_attention)
            if not getattr(self, "_supports_sdpa", True):
                EAGER.add(type(self.config))
        return method(self, requested_attention, *args, **options)

    checked.polyhead = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def mask(*sizes: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask of SDPA, for architectures that pass it to our function."""
    is_compiling, padding = torch.compiler.is_compiling(), options.get("attention_mask")
    # A configuration may get a name of ours behind the model's back: the class is asked here, too.
    if not is_compiling and type(config) in MODEL_MAPPING:
        kinds: Any = MODEL_MAPPING[type(config)]
        for kind in kinds if isinstance(kinds, (tuple, list)) else (kinds,):
            check_model(kind, str(config._attn_implementation))
    # Recorded code has no numbers of the padding yet, so the mask must be made whatever they are.
    is_recorded = padding is not None and not is_compiling and not is_readable(padding)
    if type(config) in EAGER or is_recorded:  # transformers would read the padding under vmap and in make_fx
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*sizes, config=config, **options)


# --------------------------------------------------------------------------------------------------------------- verify
def verify(model: nn.Module, batch: Mapping[str, Any] | Tensor | None = None, **inputs: Any) -> dict[str, str]:
    """Run one forward pass without gradients; return what computed each attention layer that was called, by its name.

    >>> import transformers
    >>> from polyhead.compat.huggingface import register, swap_heads
    >>> register()
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> verify(swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)]))
    {'model.layers.0.self_attn': 'sdpa', 'model.layers.1.self_attn': 'Softmax(2), Hyla(2)'}

    A layer that did not call our function has "its own" attention.  `batch`: a mapping of inputs, or the main input
    alone; `inputs` adds inputs by name.  By default four tokens.  A compiled model runs uncompiled.

    Raises ValueError if a layer has heads of ours, by name or in its configuration, but did not call them, and if the
    model cannot read four tokens.
    """
    has_inputs = batch is not None or bool(inputs)
    if not has_inputs:
        batch = torch.arange(1, 5)[None]
    arguments = inputs_by_name(model, batch, inputs)
    calls, hooks = Calls(), []

    def count(module: nn.Module, *_: Any) -> None:
        calls.modules.add(module)

    token = _CALLS.set(calls)
    try:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                hooks.append(module.register_forward_hook(count))
        with looking(model), torch.compiler.set_stance("force_eager"):
            model(**arguments)
    except Exception as error:
        if has_inputs:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"verify: {type(model).__name__} needs other inputs than four tokens ({reason})") from error
    finally:
        for hook in hooks:
            hook.remove()
        _CALLS.reset(token)
    # torch.compile wraps the model; names of layers are those of the model inside.
    model = getattr(model, "_orig_mod", model)
    check_calls(model, calls)
    return called_layers(model, calls)


def check_calls(model: nn.Module, calls: Calls) -> None:
    """Raise ValueError if a layer ignored the heads of the configuration: it computed something else."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    implementation = getattr(config, "_attn_implementation", None)
    if is_polyhead(implementation) and not calls.heads:
        raise ValueError(f"polyhead: {name} has {implementation!r} but none of its layers calls it")
    called = {getattr(module, "layer_idx", None) for module in calls.heads}
    for i, heads in enumerate(getattr(config, "polyhead_heads", None) or ()):
        if heads is not None and i not in called:
            raise ValueError(f"polyhead: layer {i} of {name} must call the heads of its configuration")


def called_layers(model: nn.Module, calls: Calls) -> dict[str, str]:
    """What computed the layers that were called.  Raises ValueError for one with a name of ours that ignored it."""
    # A module that contains, or is part of, one that called us is no further layer; nor is a part of another layer.
    covered = {part for module in calls.heads for part in module.modules()}
    layers = {}
    for name, module in model.named_modules():
        if module in calls.heads:
            layers[name] = calls.heads[module]
        elif module in calls.modules and module not in covered and covered.isdisjoint(module.modules()):
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if is_polyhead(implementation):
                kind = type(module).__name__
                raise ValueError(f"polyhead: {name} ({kind}) must call {implementation!r} but computes it itself")
            layers[name] = "its own"
            covered.update(module.modules())
    return layers
