"""Our heads in a transformers model: by name, by configuration, or swapped into a trained checkpoint."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polyhead.compat.huggingface.attention import SOFTMAX, Heads, alone, attend, pass_stream
from polyhead.compat.huggingface.calls import BY_LAYER, CALLED, PREFIX, TYPES, check_type, mask
from polyhead.config import Hyla, Linear, Mechanism, Softmax, SymbolHeads, from_dict, head_list, to_dict
from polyhead.layers.heads.groups import build

NAMES: dict[str, Mechanism] = {
    "polyhead_softmax": Softmax(1),
    "polyhead_linear": Linear(1),
    "polyhead_linear_rms": Linear(1, normalise="rms_heads"),
    "polyhead_hyla": Hyla(1),
    "polyhead_hyla_softmax": Hyla(1, normalise="softmax"),
}
"""`attn_implementation` -> the mechanism of all heads in all layers; the model sets their number."""


def register(*types: str) -> None:
    """Register `NAMES` and the configurations with heads in transformers; may be called again.

    A name is not saved with a model, heads of its configuration are (`with_heads`); `verify` shows what layers compute.

    Args:
        *types: Model types beside `TYPES`, such as "phi".

    Raises:
        ValueError: For a type that is not known to call the attention interface in every layer.
    """
    # One function for each name, and the masks that go with it: without these transformers passes no mask.
    for name, mechanism in NAMES.items():
        group = build(mechanism, 1, 1)  # holds no parameters, and the op takes any number of heads
        AttentionInterface.register(name, functools.partial(_by_name, name, functools.partial(alone, group)))
    AttentionInterface.register(BY_LAYER, _by_layer)
    for name in (BY_LAYER, *NAMES):
        AttentionMaskInterface.register(name, mask)
    for name in (*TYPES, *types):
        _classes(name)


def with_heads(config: Any, heads: Mechanism | Iterable[Any]) -> Any:
    """A copy of a transformers configuration with the heads of each layer; a model made from it checks their sizes.

    The copy has its own class and model type, "polyhead_llama" for "llama".
    `from_pretrained(folder, config=with_heads(...))` reads an ordinary checkpoint into such a model.

    Args:
        heads: Groups for all layers, or a list per layer, in which None leaves a layer's attention unchanged.
    """
    holder = _classes(_type_of(config))[0]
    by_layer = [heads] if isinstance(heads, Mechanism) else list(heads)
    if all(isinstance(group, Mechanism) for group in by_layer):
        by_layer = [by_layer] * config.num_hidden_layers
    name = config._attn_implementation
    if None in by_layer and name in NAMES and name != "polyhead_softmax":
        raise ValueError(f"heads: layers without heads of their own would lose {name!r}; set 'sdpa' for it first")
    config = copy.deepcopy(config)
    config.__class__ = holder
    before = dict(enumerate(config.polyhead_heads or ()))
    config.polyhead_heads = []
    for layer, groups in enumerate(by_layer):
        values = before.get(layer)
        if groups is not None:
            values = [to_dict(group) for group in head_list("with_heads", groups)]
        config.polyhead_heads.append(values)
    vars(config).pop("_attn_implementation_internal", None)  # the new class has a property of this name
    return config


def swap_heads(model: nn.Module, layers: Iterable[int] | None, heads: Mechanism | Sequence[Mechanism]) -> nn.Module:
    """Replace the heads of some layers (None: all) of a causal model in place; returns the model.

    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)])
    >>> model(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 100])

    All weights stay: the new heads read the model's queries, keys and values in order.  Relational heads get new
    relations and symbols; symbols are mapped by a copy of their rows of v_proj.  The model gets a copy of its
    configuration that has the heads, so it can be saved.  Swap before a model is wrapped (PEFT).

    Raises:
        ValueError: For a model of another class than transformers' own, a model without q_proj, k_proj, v_proj and
            o_proj, and layers and heads that do not match the model.  The model is then unchanged.
    """
    config: Any = getattr(model, "config", None)
    network = _classes(_type_of(config))[1]
    groups = head_list("swap_heads", heads)
    count = config.num_hidden_layers
    if layers is None:
        layers = range(count)
    layers = list(layers)
    if not set(layers) <= set(range(-count, count)):
        raise ValueError(f"swap_heads: layers must be indices of the model's {count} layers but are {layers!r:.40}")
    by_layer = {layer % count: groups for layer in layers}
    # The class of the model must be the one that the new class extends: a subclass would lose its own code.
    if type(model) not in (network, network.__mro__[2]):
        raise ValueError(f"swap_heads: the model must be a {network.__mro__[2].__name__}, got {type(model).__name__}")
    if any(isinstance(group, SymbolHeads) for group in groups) and any(p.is_meta for p in model.parameters()):
        raise ValueError("swap_heads: heads with symbols copy rows of v_proj, so swap before the model is offloaded")
    new_config = with_heads(config, map(by_layer.get, range(count)))
    _put(model, by_layer)
    for part in model.modules():
        if type(vars(part).get("config")) is type(config):
            part.config = new_config
    model.__class__ = network
    return model


class HoldsHeads:
    """Mixin of a configuration: it holds `polyhead_heads` and fixes `attn_implementation` to that of the heads."""

    @property
    def _attn_implementation_internal(self) -> str:
        return BY_LAYER

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        if name not in (None, BY_LAYER):
            kind = type(self).__name__
            raise ValueError(f"{kind}: layers have heads of their own, so attn_implementation cannot be {name!r}")

    def to_dict(self) -> dict[str, Any]:
        # LlamaForCausalLM refuses such a file if ours are not registered.
        return {**super().to_dict(), "attn_implementation": BY_LAYER}  # type: ignore[misc]


class _HasHeads:
    """Mixin of a model class: its layers get the heads of the configuration."""

    _get_static_cache_init_shape = staticmethod(lambda: None)  # it would not know the columns of relational heads

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        by_layer = {}
        if not isinstance(config.polyhead_heads, list) or len(config.polyhead_heads) != config.num_hidden_layers:
            raise ValueError(f"heads: polyhead_heads must be a list for {config.num_hidden_layers} layers")
        for layer, values in enumerate(config.polyhead_heads):
            if values is not None:
                by_layer[layer] = [from_dict(group, where="polyhead_heads") for group in values]
        _put(self, by_layer)

    def initialize_weights(self) -> None:
        """After a checkpoint is read, refuse one that lacks parameters of the heads."""
        super().initialize_weights()  # type: ignore[misc]
        for name, tensor in self.state_dict(keep_vars=True).items():  # type: ignore[attr-defined]
            # transformers sets this mark on what it has loaded.
            is_loaded = tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)
            if ".polyhead." in name and not is_loaded:
                kind = type(self).__name__
                raise ValueError(f"{kind}: the checkpoint must have {name}: load an ordinary one, then swap_heads")


def _by_name(name: str, heads: Callable[..., Any], module: Any, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    # Under tensor parallelism a process has some of the heads: HYLA would mix only these.
    if name not in ("polyhead_softmax", "polyhead_linear") and hasattr(module, "num_key_value_groups"):
        num_heads = module.config.num_attention_heads
        if tensors[0].shape[1] != num_heads:
            raise ValueError(f"polyhead: {name} needs all {num_heads} heads on one device, without tensor parallelism")
    if not torch.compiler.is_compiling():
        CALLED.get({})[module] = name  # `verify` reads it
    return attend(heads, module, *tensors, **options)


def _by_layer(module: Any, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """Layers with our heads compute these; all others compute softmax attention."""
    groups = module.config.polyhead_heads[module.layer_idx]
    heads: Any = getattr(module, "polyhead", None)
    # Another library may have put another module in the place of the heads.
    has_heads = heads is not None and any(isinstance(part, Heads) for part in heads.modules())
    if has_heads != (groups is not None):
        raise ValueError(f"polyhead: layer {module.layer_idx} must have the heads of its configuration, {groups}")
    if not has_heads:
        return _by_name("polyhead_softmax", functools.partial(alone, SOFTMAX), module, *tensors, **options)
    name = ", ".join(f"{group['kind']}({group['heads']})" for group in groups)
    return _by_name(name, heads, module, *tensors, **options)


def _type_of(config: Any) -> str:
    """The model type of a configuration, with heads or without; of anything else the name of its class."""
    return getattr(config, "model_type", type(config).__name__).removeprefix(PREFIX)


@functools.cache
def _classes(model_type: str) -> tuple[type, type]:
    """Create and register the configuration and model classes with heads: subclasses of those of `model_type`."""
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"heads: the model must be a causal language model of transformers, {model_type!r} is none")
    base = CONFIG_MAPPING[model_type]
    parent: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base]
    check_type(parent.__name__, model_type, BY_LAYER)
    members = {"__module__": __name__, "polyhead_heads": None, "model_type": f"{PREFIX}{model_type}"}
    holder = type(f"Polyhead{base.__name__}", (HoldsHeads, base), members)
    network = type(f"Polyhead{parent.__name__}", (_HasHeads, parent), {"__module__": __name__, "config_class": holder})
    AutoConfig.register(f"{PREFIX}{model_type}", holder)
    AutoModelForCausalLM.register(holder, network)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"{PREFIX}{model_type}"] = network.__name__  # the Trainer smooths shifted labels
    # Files of experts are converted by a table of model types.
    conversion = get_checkpoint_conversion_mapping(model_type)
    if conversion is not None:
        register_checkpoint_conversion_mapping(f"{PREFIX}{model_type}", conversion, overwrite=True)
    globals().update({holder.__name__: holder, network.__name__: network})  # so that pickle finds them
    return holder, network


def _put(model: Any, by_layer: Mapping[int, Sequence[Mechanism]]) -> None:
    """Put heads into the attention of layers, all or none.  Raises ValueError without separate projections."""
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    candidates = [module for module in model.modules() if module._modules.keys() >= projections]
    new_heads = {}
    for layer, groups in by_layer.items():
        modules = [module for module in candidates if getattr(module, "layer_idx", None) == layer]
        if len(modules) != 1:
            name = type(model).__name__
            raise ValueError(f"polyhead: {name} must have q_proj, k_proj, v_proj and o_proj in layer {layer}")
        new_heads[modules[0]] = Heads(groups, modules[0])
    for attention, heads in new_heads.items():
        attention.polyhead = heads.train(attention.training)
        if len(heads.symbols) and pass_stream not in attention._forward_pre_hooks.values():
            attention.register_forward_pre_hook(pass_stream, with_kwargs=True)
