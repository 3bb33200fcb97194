"""Which attention layers of a transformers model compute our heads, and the refusal of models that cannot.

`attn_implementation` is a string in a configuration.  An architecture that computes attention itself ignores it: it
would remain softmax attention, without a word.  Such models are refused when the name is chosen.
"""

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from polyhead.layers.taps import looking
from polyhead.ops.readable import is_readable

PREFIX = "polyhead_"
"""The names of our heads as `attn_implementation` begin with it, and so do model types that hold them."""

BY_LAYER = "polyhead_heads"
"""The `attn_implementation` of models whose configuration has the heads of each layer."""

OWN_ATTENTION = {
    *("bigbird_pegasus", "clap", "deepseek_ocr2", "evolla", "git", "informer", "longt5", "minimax", "pegasus_x"),
    *("pp_formulanet", "sam", "sam_hq", "unlimited_ocr"),
}
"""Folders of transformers.models that use the attention interface in some layers and other code in others."""

ITS_OWN = "its own"
"""The attention of a layer that does not call our function."""

EAGER: set[type] = set()
"""Configurations of models under our names that do not support SDPA: every mask is made for these, and is floating."""

_CALLED: ContextVar[dict[nn.Module, str]] = ContextVar("called")


def note(module: nn.Module, heads: str) -> None:
    """Record for `verify` what computes the attention of a module."""
    if not torch.compiler.is_compiling():
        _CALLED.get({})[module] = heads


def is_polyhead(name: object) -> TypeGuard[str]:
    """Whether an `attn_implementation` is one of our heads."""
    return isinstance(name, str) and name.startswith(PREFIX)


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
    """The mask that architectures pass to our function: that of SDPA or, for models without it, the floating one."""
    if type(config) in EAGER:
        return eager_mask(*sizes, config=config, **options)
    is_compiling, padding = torch.compiler.is_compiling(), options.get("attention_mask")
    # A configuration may get a name of ours behind the model's back: the class is asked here, too.
    name = getattr(config, "_attn_implementation", None)
    if not is_compiling and is_polyhead(name) and type(config) in MODEL_MAPPING:
        kinds: Any = MODEL_MAPPING[type(config)]
        for kind in kinds if isinstance(kinds, (tuple, list)) else (kinds,):
            check_model(kind, name)
    # Recorded code has no numbers of the padding yet, so the mask must be made whatever they are.
    if padding is not None and not is_compiling and not is_readable(padding):
        options["allow_is_causal_skip"] = False  # transformers would read the padding under vmap and in make_fx
    return sdpa_mask(*sizes, config=config, **options)


def inputs_by_name(
    model: nn.Module, batch: Mapping[str, Any] | Tensor | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a call by name, with tensors on the model's device; `batch` may be the main input alone."""
    if isinstance(batch, Tensor):
        batch = {getattr(model, "main_input_name", "input_ids"): batch}
    arguments = {**(batch or {}), **inputs}
    # Offloaded parameters are on the meta device until accelerate loads them, and then it moves the inputs, too.
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = value.to(device)
    return arguments


def verify(model: nn.Module, batch: Mapping[str, Any] | Tensor | None = None, **inputs: Any) -> dict[str, str]:
    """Run one forward pass without gradients; return what computed each attention layer that was called, by its name.

    >>> import transformers
    >>> from polyhead.compat.huggingface import swap_heads
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> verify(swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)]))
    {'model.layers.0.self_attn': 'sdpa', 'model.layers.1.self_attn': 'Softmax(2), Hyla(2)'}

    A layer that did not call our function has "its own" attention.  `batch`: a mapping of inputs, or the main input
    alone; `inputs` adds inputs by name.  By default four tokens.  A compiled model runs uncompiled.

    Raises ValueError if a layer has heads of ours, by name or in its configuration, but did not call them, and if the
    model cannot read four tokens.
    """
    is_default = batch is None and not inputs
    if is_default:
        batch = torch.arange(1, 5)[None]
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
            model(**inputs_by_name(model, batch, inputs))
    except Exception as error:
        if not is_default:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"verify: {type(model).__name__} needs other inputs than four tokens ({reason})") from error
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
