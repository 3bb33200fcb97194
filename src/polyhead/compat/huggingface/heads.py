"""Our heads in a transformers model: by name, by configuration, or swapped into a trained checkpoint.

    register()
    AutoModelForCausalLM.from_config(llama, attn_implementation="polyhead_hyla")      to try: the name is not saved
    AutoModelForCausalLM.from_config(with_heads(llama, ph.Hyla(32, kv_heads=8)))      saved and loaded as it is
    swap_heads(model, [4, 5], [ph.Softmax(16), ph.Relational(16)])                    a checkpoint, weights kept

transformers does not save `attn_implementation`: a model saved under one of `NAMES` is loaded with softmax attention.
A configuration with heads has its own class and model type ("polyhead_llama" for "llama"), so loading it without this
module is an error.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polyhead import config as configs
from polyhead.compat.huggingface.attention import (
    Heads,
    LayerSizes,
    alone,
    attend,
    check_options,
    fitted,
    is_quantised,
    with_symbols,
)
from polyhead.compat.huggingface.calls import BY_LAYER, STOCK, check_model, guard, mask, note
from polyhead.compat.huggingface.taps import PREFIX
from polyhead.config import Hyla, Linear, Mechanism, Softmax, head_list
from polyhead.layers.heads.groups import build

NAMES: dict[str, Mechanism] = {
    "polyhead_softmax": Softmax(1),
    "polyhead_linear": Linear(1),
    "polyhead_linear_rms": Linear(1, normalise="rms_heads"),
    "polyhead_hyla": Hyla(1),
    "polyhead_hyla_softmax": Hyla(1, normalise="softmax"),
}
"""`attn_implementation` -> the mechanism of all heads in all layers; the model sets their number."""

TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "smollm3", "starcoder2", "cohere")
"""Model types for which `register` makes classes.  Call `register("phi")` for others, also before loading one."""

Layers = list[tuple[Mechanism, ...] | None]
"""The heads of each layer; None leaves a layer unchanged."""


def register(*types: str) -> None:
    """Register `NAMES` and the configurations with heads in transformers; may be called again.

    A model that computes attention itself raises ValueError for them; `verify` shows what each layer computes.

    >>> register()
    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = transformers.AutoModelForCausalLM.from_config(llama, attn_implementation="polyhead_hyla")
    >>> model(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 100])
    """
    # One function for each name, and the masks that go with it: without these transformers passes no mask.
    functions: dict[str, Callable[..., Any]] = {BY_LAYER: _by_layer}
    for name, mechanism in NAMES.items():
        group = build(mechanism, 1, 1)  # holds no parameters, and the op takes any number of heads
        functions[name] = functools.partial(_by_name, name, alone(group))
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    guard()
    for name in (*TYPES, *types):
        if name in CONFIG_MAPPING or name in types:
            _classes(name)


def with_heads(config: Any, heads: Mechanism | Iterable[Any]) -> Any:
    """A copy of a transformers configuration with the heads of each layer.

    `heads`: groups for all layers, or a list per layer, in which None leaves a layer's attention unchanged.  Groups get
    the model's widths.  Raises ValueError for other widths.

    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> mixed = with_heads(llama, [None, [Softmax(2), Hyla(2)]])
    >>> type(transformers.AutoModelForCausalLM.from_config(mixed)).__name__, mixed.model_type
    ('PolyheadLlamaForCausalLM', 'polyhead_llama')

    `from_pretrained(folder, config=with_heads(...))` reads an ordinary checkpoint into such a model.
    """
    register()
    sizes, num_layers = layer_sizes(config), config.num_hidden_layers
    # A single group, groups for every layer, or a list of groups for each layer.
    by_layer = [heads] if isinstance(heads, Mechanism) else list(heads)
    if all(isinstance(group, Mechanism) for group in by_layer):
        by_layer = [by_layer] * num_layers
    if len(by_layer) != num_layers:
        raise ValueError(f"with_heads: give heads of each of the {num_layers} layers, got {len(by_layer)}")
    layers: Layers = [None] * num_layers
    for layer, groups in enumerate(by_layer):
        if groups is not None:
            layers[layer] = checked = head_list("with_heads", groups)
            fitted("with_heads", checked, sizes)
    return _with_layers(config, layers)


def swap_heads(
    model: nn.Module, layers: int | Sequence[int] | None, heads: Mechanism | Sequence[Mechanism]
) -> nn.Module:
    """Replace the heads of some layers (None: all) of a causal model in place; returns the model.

    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)])
    >>> model(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 100])

    All weights stay, as the same parameter objects: the new heads read the model's queries, keys and values in order.
    Relational heads get new relations and symbols; symbols are mapped by a copy of their rows of v_proj.  The model
    gets a copy of its configuration that has the heads, so it can be saved.  Swap before a model is wrapped (PEFT).

    Raises ValueError for a model without q_proj, k_proj, v_proj and o_proj, and for heads that do not match the model.
    The model is then unchanged.
    """
    register()
    config: Any = getattr(model, "config", None)
    groups = head_list("swap_heads", heads)
    fitted("swap_heads", groups, layer_sizes(config))
    num_layers = config.num_hidden_layers
    chosen = list(range(num_layers))
    if isinstance(layers, int):
        layers = [layers]
    if layers is not None:
        chosen = [layer + num_layers if layer < 0 else layer for layer in layers]
        for layer in chosen:
            if layer not in range(num_layers):
                raise ValueError(f"swap_heads: layers must be below {num_layers} but are {list(layers)}")
    # The class of the model must be the one that the new class extends: its code then runs on unchanged.
    holder, network = _classes(_base_type(config))
    if not isinstance(model, network.__mro__[2]):
        raise ValueError(f"swap_heads: the model must be a {network.__mro__[2].__name__}, got {type(model).__name__}")
    # All new heads are built before the first change, so that an error leaves the model as it was.
    attentions = _attentions(model, chosen)
    for layer in chosen:
        if any(parameter.is_meta for parameter in attentions[layer].v_proj.parameters()):
            raise ValueError(f"swap_heads: layer {layer} must be in memory but accelerate has offloaded its weights")
    new_heads = {layer: _new_heads(attentions[layer], groups, config) for layer in chosen}

    by_layer: Layers = [None] * num_layers
    if isinstance(config, holder):
        by_layer = layer_heads(config)
    for layer, module in new_heads.items():
        _put(attentions[layer], module)
        by_layer[layer] = groups
    new_config = _with_layers(config, by_layer)  # the object that the caller may hold does not change
    for part in model.modules():
        if vars(part).get("config") is config:
            part.config = new_config
    model.__class__ = network
    return model


def layer_heads(config: Any) -> Layers:
    """The heads of each layer of a configuration, from its JSON values.  Raises ValueError unless all have an entry."""
    stored, num_layers = config.polyhead_heads or [], config.num_hidden_layers
    if len(stored) != num_layers:
        raise ValueError(f"polyhead_heads: heads of {num_layers} layers must be there but are of {len(stored)}")
    layers: Layers = [None] * num_layers
    for layer, groups in enumerate(stored):
        if groups is not None:
            layers[layer] = tuple(configs.from_dict(group, where="polyhead_heads") for group in groups)
    return layers


class HoldsHeads:
    """Mixin of a configuration class: it holds `polyhead_heads` and fixes `attn_implementation` to that of the heads.

    The file has the implementation, too, so that even a class used by name, LlamaForCausalLM, refuses it if ours are
    not registered.
    """

    polyhead_heads: list[Any] | None

    @property
    def _attn_implementation_internal(self) -> str:
        return BY_LAYER

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        if name not in (None, BY_LAYER):
            kind = type(self).__name__
            raise ValueError(f"{kind}: layers have heads of their own, so attn_implementation cannot be {name!r}")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "attn_implementation": BY_LAYER}  # type: ignore[misc]


class _HasHeads:
    """Mixin of a model class: its layers get the heads of the configuration."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for layer, groups in enumerate(layer_heads(config)):
            if groups is not None:
                attention = _attentions(self, [layer])[layer]  # type: ignore[arg-type]
                _put(attention, _new_heads(attention, groups, config))

    def initialize_weights(self) -> None:
        """After a checkpoint is read, initialise the parameters that it did not have."""
        super().initialize_weights()  # type: ignore[misc]
        for attention in self.modules():  # type: ignore[attr-defined]
            if isinstance(getattr(attention, "polyhead", None), Heads):
                attention.polyhead.begin(attention.v_proj, maps=True)

    def _get_static_cache_init_shape(self) -> object:
        """None with relational heads, whose keys are wider: the first keys then give a static cache its width."""
        wider = any(hasattr(module, "polyhead_stream") for module in self.modules())  # type: ignore[attr-defined]
        return None if wider else super()._get_static_cache_init_shape()  # type: ignore[misc]


def _by_name(
    name: str, heads: Callable[..., Any], module: nn.Module, *tensors: Any, **options: Any
) -> tuple[Tensor, Any]:
    note(module, name)
    return attend(heads, module, *tensors, **options)


def _by_layer(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Any]:
    """Layers with our heads compute these; all others compute softmax attention by PyTorch's kernels."""
    config: Any = module.config
    if not isinstance(config, HoldsHeads):
        name = type(module).__name__
        raise ValueError(f"polyhead: {name} must belong to a model whose configuration holds heads: use AutoModel")
    heads_by_layer: Any = config.polyhead_heads
    groups = heads_by_layer[module.layer_idx]
    heads: Any = getattr(module, "polyhead", None)
    # Another library may have put another module in the place of the heads.
    has_heads = heads is not None and any(isinstance(part, Heads) for part in heads.modules())
    if has_heads != (groups is not None):
        raise ValueError(f"polyhead: layer {module.layer_idx} must have the heads of its configuration, {groups}")
    if has_heads:
        note(module, ", ".join(f"{group['kind']}({group['heads']})" for group in groups))
        return attend(heads, module, *tensors, **options)
    if options.get("softcap") is not None or options.get("s_aux") is not None:  # "sdpa" would ignore them
        return _by_name("polyhead_softmax", alone(build(Softmax(1), 1, 1)), module, *tensors, **options)
    note(module, STOCK)
    check_options(module, options, tensors[3] if len(tensors) > 3 else options.get("attention_mask"))
    return sdpa_attention_forward(module, *tensors, **options)


@functools.cache
def _classes(model_type: str) -> tuple[type, type]:
    """Create and register the configuration and model classes with heads: subclasses of those of `model_type`."""
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"polyhead: {model_type} must be a type of causal language model")
    base = CONFIG_MAPPING[model_type]
    parent: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base]
    check_model(parent, BY_LAYER)
    # Two classes made at run time: the configuration holds heads, the model builds them.
    members = {"__module__": __name__, "polyhead_heads": None, "model_type": f"{PREFIX}{model_type}"}
    holder = type(f"Polyhead{base.__name__}", (HoldsHeads, base), members)
    network = type(f"Polyhead{parent.__name__}", (_HasHeads, parent), {"__module__": __name__, "config_class": holder})
    AutoConfig.register(f"{PREFIX}{model_type}", holder)
    AutoModelForCausalLM.register(holder, network)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"{PREFIX}{model_type}"] = network.__name__  # the Trainer smooths shifted labels
    # pickle and `getattr(transformers, name)` look a class up by its module and name.
    globals().update({holder.__name__: holder, network.__name__: network})
    return holder, network


def _base_type(config: Any) -> str:
    return config.model_type.removeprefix(PREFIX)


def _with_layers(config: Any, layers: Layers) -> Any:
    """A copy of a configuration with the heads of each layer."""
    config = copy.deepcopy(config)
    config.__class__ = _classes(_base_type(config))[0]
    config.polyhead_heads = []
    for groups in layers:
        config.polyhead_heads.append(groups and [configs.to_dict(group) for group in groups])
    vars(config).pop("_attn_implementation_internal", None)  # the new class has a property of this name
    return config


def layer_sizes(config: Any, bias: bool = False) -> LayerSizes:
    """The sizes of the layers of the configuration of a causal language model in transformers."""
    kind = type(config).__name__
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if not hasattr(config, name):
            raise ValueError(
                f"polyhead: the configuration must be that of a causal language model, {kind} has no {name}"
            )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerSizes(config.hidden_size, heads, kv_heads, dim, config.max_position_embeddings, bias)


def _attentions(model: nn.Module, layers: Iterable[int]) -> dict[int, Any]:
    """The attention modules of some layers.  Raises ValueError unless each of them has separate projections."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "layer_idx")
    modules: list[Any] = [module for module in model.modules() if all(hasattr(module, part) for part in parts)]
    indices = [module.layer_idx for module in modules]
    attentions = {}
    for layer in layers:
        if indices.count(layer) != 1:
            name, projections = type(model).__name__, "q_proj, k_proj, v_proj and o_proj"
            raise ValueError(f"polyhead: {name} must have {projections} in each layer that gets heads")
        attentions[layer] = modules[indices.index(layer)]
    return attentions


def _new_heads(attention: Any, groups: Sequence[Mechanism], config: Any) -> Heads:
    """Heads for an attention module, initialised, on its device and in its dtype."""
    weight = attention.v_proj.weight
    dtype = None if is_quantised(weight) else weight.dtype  # a quantised weight does not show the dtype of values
    sizes = layer_sizes(config, attention.v_proj.bias is not None)
    heads = Heads(groups, sizes, device=weight.device, dtype=dtype).train(attention.training)
    heads.begin(attention.v_proj)
    return heads


def _put(attention: Any, heads: Heads) -> None:
    """Put heads into an attention module."""
    attention.polyhead = heads
    if len(heads.symbols) and not hasattr(type(attention), "polyhead_stream"):
        kind: Any = type(attention)
        attention.__class__ = with_symbols(kind)
