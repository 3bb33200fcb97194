"""The check that attention layers of a transformers model compute our heads; models that do not are refused.

    verify(model)           a tiny forward pass; a row for each attention layer: its calls, and what it computes

`attn_implementation` is a string in a configuration.  An architecture that computes attention itself ignores it: it
would remain softmax attention, or add our Boolean mask to its scores.  Three checks refuse such a model, each by its
name:

    construction            transformers calls one method to check a name; our check runs first
    creation of masks       masks are made from the configuration, which has the name
    first forward pass      every module named ...Attention must call our function, contain one that does, or be in one
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from polyhead.compat.huggingface.taps import EAGER, PREFIX, by_name, ours, without_sdpa
from polyhead.compat.torch_mha.module import MultiheadAttention as DropIn
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.taps import looking
from polyhead.spec.shapes import one_of

OF_LAYERS = "polyhead_heads"
"""The `attn_implementation` of models whose configuration has heads; each layer has its own."""

_WANTED = "polyhead: {} must call its attention through transformers' AttentionInterface for {!r}"
_SYMBOLIC = ("relational", "disentangled", "abstractor")
_COUNT: ContextVar["Calls | None"] = ContextVar("calls", default=None)


def note(module: nn.Module, heads: str) -> None:
    """Record that a layer's attention called our function."""
    if not torch.compiler.is_compiling() and (calls := _COUNT.get()) is not None:
        calls.heads[module] = heads
        calls.came[module] += 1


@dataclass
class Calls:
    """The attention calls of one forward pass."""

    heads: dict[nn.Module, str] = field(default_factory=dict)
    """Modules that called our function -> the heads that computed them."""

    came: Counter[nn.Module] = field(default_factory=Counter)
    """Modules that called our function -> number of calls."""

    count: Counter[nn.Module] = field(default_factory=Counter)
    """Modules of a class named ...Attention -> number of calls."""

    def called(self, module: nn.Module, *_: Any) -> None:
        """A forward hook that counts the call of a module."""
        self.count[module] += 1

    def foreign(self) -> list[nn.Module]:
        """Modules that computed attention without our function, outermost only."""
        inside = {part for module in self.heads for part in module.modules()}
        alone = [m for m in self.count if m not in inside and not any(part in self.heads for part in m.modules())]
        within = {part for module in alone for part in list(module.modules())[1:]}
        return [module for module in alone if module not in within]


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[Calls]:
    """Context manager: count the calls inside."""
    calls, hooks = Calls(), []
    token = _COUNT.set(calls)
    try:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                hooks.append(module.register_forward_hook(calls.called))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        _COUNT.reset(token)


def _goes_through(kind: type[PreTrainedModel]) -> bool:
    """Whether the source of a model class mentions the attention interface; the same rule as in transformers."""
    return kind._can_set_attn_implementation()


def uses_interface(kind: type, name: str) -> None:
    """Raise ValueError for a model class that computes attention itself."""
    if issubclass(kind, PreTrainedModel) and not _goes_through(kind):
        raise ValueError(f"{_WANTED.format(kind.__name__, name)} but computes it itself")


def _refuse_in_tables(kind: type, name: str) -> None:
    """Make tables of attention classes by `attn_implementation` in a model's files raise ValueError for our name."""
    files = (vars(sys.modules[module]) for module in {base.__module__ for base in kind.__mro__} & set(sys.modules))
    for table in (value for names in files for value in names.values() if type(value) is dict):
        eager = table.get("eager")
        if isinstance(eager, type) and issubclass(eager, nn.Module):
            table[name] = functools.partial(_not_in_table, eager.__name__, name)


def _not_in_table(who: str, name: str, *_: object, **__: object) -> None:
    raise ValueError(f"{_WANTED.format(who, name)} but computes it itself")


def mask(*sizes: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask of SDPA, for architectures that pass it to our function."""
    if config is not None and not torch.compiler.is_compiling() and type(config) in MODEL_MAPPING:
        found: Any = MODEL_MAPPING[type(config)]
        for kind in found if isinstance(found, (tuple, list)) else (found,):
            uses_interface(kind, str(config._attn_implementation))
    if type(config) in EAGER:
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*sizes, config=config, **options)


def guard() -> None:
    """Install the checks of models with a name of ours; may be called again."""
    for name, before in (("get_correct_attn_implementation", _asked), ("set_attn_implementation", _set)):
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "polyhead"):
            setattr(PreTrainedModel, name, _first(before, method))


def _first(before: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def asked(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        before(self, *args, **options)
        return method(self, *args, **options)

    asked.polyhead = True  # type: ignore[attr-defined]
    return asked


def _known(name: str) -> None:
    """Raise ValueError for a name of ours whose heads need more than q, k and v."""
    heads = name.removeprefix(PREFIX)
    if heads in _SYMBOLIC:
        raise ValueError(
            f"polyhead: {heads} heads read more than q, k and v, so attn_implementation={name!r} cannot be: use "
            f"polyhead.compat.huggingface.swap_heads(model, layers, ph.{heads.capitalize()}(...)), or with_heads "
            "for a new model"
        )
    if name != OF_LAYERS:
        names = [own for own in ALL_ATTENTION_FUNCTIONS.valid_keys() if ours(own) and own != OF_LAYERS]
        one_of("polyhead", "attn_implementation", name, names)


def _asked(model: PreTrainedModel, requested_attention: Any = None, *_: Any, **__: Any) -> None:
    if ours(requested_attention):
        _known(requested_attention)
        uses_interface(type(model), requested_attention)
        _refuse_in_tables(type(model), requested_attention)
        watch(model)


def _set(model: PreTrainedModel, attn_implementation: Any = None, *_: Any, **__: Any) -> None:
    """Set the name for a model and its inner models, for which transformers only warns: one name for all, or one for
    each part of the configuration."""
    by_part = attn_implementation if isinstance(attn_implementation, dict) else {None: attn_implementation}
    for part, name in by_part.items():
        if ours(name):
            _known(name)
        config = getattr(model.config, part, None) if part else model.config
        for module in model.modules() if ours(name) else ():
            if isinstance(module, PreTrainedModel) and (part is None or module.config is config):
                uses_interface(type(module), name)


def watch(model: nn.Module) -> None:
    """Check the first forward pass of a model, see `_Watch`."""
    EAGER.update(type(inner.config) for inner in without_sdpa(model))
    if not any(isinstance(hook, _Watch) for hook in model._forward_hooks.values()):
        watching = _Watch()
        model.register_forward_pre_hook(watching.before)
        model.register_forward_hook(watching, always_call=True)


class _Watch:
    """Two hooks that check one forward pass and then remove themselves.

    For a model inside a model, the outer one is checked.  A model compiled as a whole by torch.compile is not checked.
    """

    def __init__(self) -> None:
        self.open: tuple[Calls, contextlib.ExitStack] | None = None

    def before(self, model: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and _COUNT.get() is None:
            stack = contextlib.ExitStack()
            self.open = stack.enter_context(counted(model)), stack

    def __call__(self, model: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.open is None:
            return
        (calls, stack), self.open = self.open, None
        stack.close()
        if output is None:  # the forward pass raised an error
            return
        check(model, calls)
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (self, self.before)]:
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)


def check(model: nn.Module, calls: Calls) -> None:
    """Raise ValueError if heads in a configuration of the model were not called."""
    who = type(model).__name__
    promised, names = _promised(model), {module: name for name, module in model.named_modules()}
    for module in calls.foreign():
        if module in promised:
            where = f"{names[module]} ({type(module).__name__})"
            raise ValueError(f"{_WANTED.format(who, promised[module])} but {where} computes it itself")
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if ours(name) and not calls.heads:
        raise ValueError(f"{_WANTED.format(who, name)} but none of its layers does")
    held = getattr(getattr(model, "config", None), "polyhead_heads", None) or ()
    came = {getattr(module, "layer_idx", None) for module in calls.heads}
    for layer in (i for i, heads in enumerate(held) if heads is not None and i not in came):
        raise ValueError(f"polyhead: layer {layer} of {who} must call the heads that its configuration holds")


def _promised(model: nn.Module, above: Any = None) -> dict[nn.Module, str]:
    """Every module of a class named ...Attention whose configuration has a name of ours, with the name."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", above)
    found = {model: name} if ours(name) and "Attention" in type(model).__name__ else {}
    for child in model.children():
        found |= _promised(child, name)
    return found


@dataclass(frozen=True)
class Layer:
    """An attention layer in one forward pass."""

    name: str
    kind: str
    calls: int
    heads: str
    """What computed it: our heads, or another implementation."""

    ours: bool


@dataclass(frozen=True)
class Verified:
    """The attention layers of a model, in its order; printed as a table."""

    model: str
    layers: tuple[Layer, ...]

    def __repr__(self) -> str:
        rows = [("layer", "class", "calls", "ours", "heads")]
        rows += [(x.name, x.kind, str(x.calls), "yes" if x.ours else "no", x.heads) for x in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        own = sum(layer.ours for layer in self.layers)
        return "\n".join((f"{self.model}: {own} of {len(self.layers)} attention layers are ours", *lines))


def verify(model: nn.Module, batch: Mapping[str, Any] | Tensor | None = None, **inputs: Any) -> Verified:
    """Run one forward pass without gradients; list the attention layers, how often each was called, and which are ours.

    >>> import transformers
    >>> from polyhead.compat.huggingface import register, swap_heads
    >>> register()
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> verify(swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)]))
    PolyheadLlamaForCausalLM: 1 of 2 attention layers are ours
    layer                     class           calls  ours  heads
    model.layers.0.self_attn  LlamaAttention  1      no    sdpa
    model.layers.1.self_attn  LlamaAttention  1      yes   Softmax(2), Hyla(2)

    `batch`: a mapping of inputs, or the main input alone; `inputs` adds inputs by name.  By default four tokens, or an
    image of noise.  A compiled model runs uncompiled.

    Raises ValueError if heads in the configuration were not called, or if the model needs other inputs.
    """
    given = by_name(model, _tiny(model) if batch is None and not inputs else batch, inputs)
    with looking(model), torch.compiler.set_stance("force_eager"), counted(model) as calls:
        model(**given)
    inner = getattr(model, "_orig_mod", model)
    check(inner, calls)
    alone = calls.foreign()
    found = [(name, module, _who(module, calls, alone)) for name, module in inner.named_modules()]
    layers = tuple(Layer(name, type(module).__name__, *who) for name, module, who in found if who[0])
    return Verified(type(inner).__name__, layers)


def _who(module: nn.Module, calls: Calls, alone: list[nn.Module]) -> tuple[int, str, bool]:
    """How often a layer was called, what computed it, and whether that is ours; 0 calls if it is not an attention
    layer."""
    if module in calls.heads:
        return calls.came[module], calls.heads[module], calls.heads[module] != ELSEWHERE
    if module not in alone:
        return 0, "", False
    groups = module.groups if isinstance(module, (MultiHeadAttention, DropIn)) else ()
    return calls.count[module], ", ".join(type(group).__name__ for group in groups) or "its own", bool(groups)


ELSEWHERE = "sdpa"
"""The implementation of a layer that calls our function but has no heads of ours."""


def _tiny(model: Any) -> dict[str, Any]:
    """Inputs for a model of tokens or images."""
    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if main == "input_ids" and config is not None:
        ids = torch.arange(1, 5)[None] % config.get_text_config().vocab_size
        return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    if main == "pixel_values" and isinstance(size := getattr(config, "image_size", None), int):
        shape = 1, getattr(config, "num_channels", 3), size, size
        return {"pixel_values": torch.randn(shape, dtype=getattr(model, "dtype", None))}
    raise ValueError(f"verify: {type(model).__name__} must be given inputs by name (main: {main}) but none came")
