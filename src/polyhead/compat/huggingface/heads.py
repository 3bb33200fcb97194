"""Our heads in a model of transformers: by name, by configuration, or swapped into a trained checkpoint.

    register()
    AutoModelForCausalLM.from_config(llama, attn_implementation="polyhead_hyla")      to try: the name is not saved
    AutoModelForCausalLM.from_config(with_heads(llama, ph.Hyla(32, kv_heads=8)))      saved and loaded as it is
    swap_heads(model, [4, 5], [ph.Softmax(16), ph.Relational(16)])                    a checkpoint, weights kept

transformers keeps no `attn_implementation`: a model saved under one of `NAMES` comes back with softmax attention.  A
configuration that holds heads has a class and a model type of its own ("polyhead_llama" for "llama"), so that loading
it where this module is not registered is an error.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from polyhead import config as ours
from polyhead.compat.huggingface.attention import Heads, Place, alone, attend, fitted, refuse, with_symbols
from polyhead.compat.huggingface.calls import ELSEWHERE, OF_LAYERS, guard, mask, note, uses_interface, watch
from polyhead.compat.huggingface.config import FindsItself
from polyhead.config import Hyla, Linear, Mechanism, Softmax, SymbolHeads, head_list
from polyhead.layers.heads.groups import build

NAMES: dict[str, Mechanism] = {
    "polyhead_softmax": Softmax(1),
    "polyhead_linear": Linear(1),
    "polyhead_linear_rms": Linear(1, normalise="rms_heads"),
    "polyhead_hyla": Hyla(1),
    "polyhead_hyla_softmax": Hyla(1, normalise="softmax"),
}
"""What `attn_implementation` may be; all heads of all layers are of that mechanism, as many as the model has."""

TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "smollm3", "starcoder2", "cohere")
"""Model types that `register` makes classes for; others by `register("phi")`, also before such a model is loaded."""

Layers = list[tuple[Mechanism, ...] | None]
"""The heads of each layer; None leaves a layer as it is."""


def register(*types: str) -> None:
    """Make `NAMES` and the configurations that hold heads known to transformers; may be called again.

    >>> register()
    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = transformers.AutoModelForCausalLM.from_config(llama, attn_implementation="polyhead_hyla")
    >>> model(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 100])

    The mask interface learns the names, too: without that a function is given no mask, and padding is attended to.  A
    model that computes attention itself is refused, when it is made or at its first forward pass at the latest.
    """
    for name, mechanism in NAMES.items():
        group = build(mechanism, 1, 1)  # holds no parameters, and the op takes any number of heads
        AttentionInterface.register(name, functools.partial(_by_name, name, alone(group)))
        AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(OF_LAYERS, _of_layers)
    AttentionMaskInterface.register(OF_LAYERS, mask)
    guard()
    for name in (*TYPES, *types):
        if name in CONFIG_MAPPING or name in types:
            _classes(name)


def with_heads(config: Any, heads: Mechanism | Sequence[Any]) -> Any:
    """A copy of a configuration of transformers that holds the heads of each layer.

    `heads`: groups for all layers, or a list per layer, in which None leaves a layer's attention as it is.

    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> mixed = with_heads(llama, [None, [Softmax(2), Hyla(2)]])
    >>> type(transformers.AutoModelForCausalLM.from_config(mixed)).__name__, mixed.model_type
    ('PolyheadLlamaForCausalLM', 'polyhead_llama')

    `from_pretrained(folder, config=with_heads(...))` reads an ordinary checkpoint into such a model.  Groups whose
    keys are the model's own, grouped as the model groups them, need no sizes; other widths are a ValueError.
    """
    register()
    count = config.num_hidden_layers
    nested = not isinstance(heads, Mechanism) and any(not isinstance(group, Mechanism) for group in heads)
    each = list(heads) if nested else [heads] * count  # type: ignore[arg-type]
    if len(each) != count:
        raise ValueError(f"with_heads: {count} layers were wanted but heads of {len(each)} came")
    layers: Layers = [None if groups is None else head_list("with_heads", groups) for groups in each]
    for groups in layers:
        if groups is not None:
            fitted("with_heads", groups, _place(config))
    return _hold(copy.deepcopy(config), layers)


def swap_heads(model: nn.Module, layers: Sequence[int] | None, heads: Mechanism | Sequence[Mechanism]) -> nn.Module:
    """Give some layers (None: all) of a causal model other heads; the model itself, changed, is returned.

    >>> import transformers
    >>> llama = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = swap_heads(transformers.LlamaForCausalLM(llama), [1], [Softmax(2), Hyla(2)])
    >>> model(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 100])

    All weights stay, parameters are the same objects: heads read the queries, keys and values they had, in their
    order.  Relational heads get new relations and symbols, which go through a copy of their rows of v_proj, whose own
    rows then have no effect.  The configuration holds the heads, so that the model is saved and loaded as it is.  A
    model that PEFT has wrapped keeps its adapters, and takes heads without parameters of their own.

    ValueError for a model without q_proj, k_proj, v_proj and o_proj, and for heads that do not fit it; the model is
    then as it was.
    """
    register()
    config: Any = model.config
    groups = head_list("swap_heads", heads)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(True for _ in Heads(groups, _place(config), device=torch.device("meta")).parameters()):
            raise ValueError(
                "swap_heads: heads with parameters of their own must come before PEFT, whose "
                f"modules_to_save=['polyhead'] then keeps them, but a {type(model).__name__} came"
            )
        swap_heads(model.get_base_model(), layers, groups)  # type: ignore[operator]
        return model
    count = config.num_hidden_layers
    chosen = range(count) if layers is None else [layer + count if layer < 0 else layer for layer in layers]
    if any(not 0 <= layer < count for layer in chosen):
        raise ValueError(f"swap_heads: layers must be below {count} but are {list(layers or ())}")
    fitted("swap_heads", groups, _place(config))
    holder, network = _classes(_base_type(config))
    if not isinstance(model, network.__mro__[2]):
        raise ValueError(f"swap_heads: a {network.__mro__[2].__name__} was wanted but a {type(model).__name__} came")
    attentions = _attentions(model)
    for layer in chosen:
        _put(attentions[layer], groups, config)
        attentions[layer].polyhead.begin(attentions[layer].v_proj)
    before = layer_heads(config) if isinstance(config, holder) else [None] * count
    _hold(config, [groups if layer in chosen else before[layer] for layer in range(count)])
    model.__class__ = network
    watch(model)
    return model


def layer_heads(config: Any) -> Layers:
    """What a configuration holds, read from its JSON values."""
    return [
        None if groups is None else tuple(ours.from_dict(group, where="polyhead_heads") for group in groups)
        for groups in config.polyhead_heads
    ]


class HoldsHeads(FindsItself):
    """Before a configuration class: `polyhead_heads`, and no other implementation than that of the heads.

    The file names the implementation, too, so that even a class that is asked for by name, LlamaForCausalLM, refuses
    it where ours are not known.
    """

    polyhead_heads: list[Any] | None

    @property
    def _attn_implementation_internal(self) -> str:
        return OF_LAYERS

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        if name not in (None, OF_LAYERS):
            kind = type(self).__name__
            raise ValueError(f"{kind}: layers have heads of their own, so attn_implementation cannot be {name!r}")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "attn_implementation": OF_LAYERS}

    def auto_classes(self) -> dict[str, str]:
        holder, network = _classes(_base_type(self))
        return {"AutoConfig": holder.__name__, "AutoModelForCausalLM": network.__name__}


class _HasHeads:
    """Before a model class: its layers get the heads that the configuration holds."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attentions = _attentions(self)  # type: ignore[arg-type]
        for attention, groups in zip(attentions, layer_heads(config), strict=True):
            if groups is not None:
                _put(attention, groups, config)
                attention.polyhead.begin(attention.v_proj)

    def initialize_weights(self) -> None:
        """After a checkpoint is read: what it did not have."""
        super().initialize_weights()  # type: ignore[misc]
        for attention in _attentions(self):  # type: ignore[arg-type]
            if isinstance(getattr(attention, "polyhead", None), Heads):
                attention.polyhead.begin(attention.v_proj)


def _by_name(
    name: str, heads: Callable[..., Any], module: nn.Module, *tensors: Any, **options: Any
) -> tuple[Tensor, Any]:
    note(module, name)
    return attend(heads, module, *tensors, **options)


def _of_layers(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Any]:
    """Layers with heads of their own compute these, all others what they did before, by PyTorch's kernels."""
    if not isinstance(getattr(module, "config", None), HoldsHeads):
        who = type(module).__name__
        raise ValueError(f"polyhead: {who} must belong to a model whose configuration holds heads: use AutoModel")
    heads = _heads_of(module)
    if heads is not None:
        note(module, _said(module, heads))
        return attend(heads, module, *tensors, **options)
    note(module, ELSEWHERE)
    refuse(module, options)
    return sdpa_attention_forward(module, *tensors, **options)


def _heads_of(module: Any) -> nn.Module | None:
    """What stands where the heads of a layer are: they, or what wraps them.  ValueError unless that is what the
    configuration says."""
    held, heads = module.config.polyhead_heads[module.layer_idx] is not None, getattr(module, "polyhead", None)
    if heads is not None and not any(isinstance(part, Heads) for part in heads.modules()):
        came = f"a {type(heads).__name__} without any"
    elif held == (heads is not None):
        return heads
    else:
        came = "none" if held else "some"
    wanted = "the heads that its configuration holds" if held else "none of its own, as its configuration says,"
    raise ValueError(f"polyhead: layer {module.layer_idx} ({type(module).__name__}) must have {wanted} but has {came}")


def _said(module: Any, heads: nn.Module) -> str:
    """The heads of a layer in a few words."""
    groups = module.config.polyhead_heads[module.layer_idx]
    said = ", ".join(f"{group['kind']}({group['heads']})" for group in groups)
    return said if isinstance(heads, Heads) else f"{said} in a {type(heads).__name__}"


@functools.cache
def _classes(model_type: str) -> tuple[type, type]:
    """The configuration and the model that hold heads, registered: subclasses of those of `model_type`."""
    base = CONFIG_MAPPING[model_type]
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"polyhead: {model_type} must be a type of causal language model")
    parent: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base]
    uses_interface(parent, OF_LAYERS)
    what = {"__module__": __name__, "polyhead_heads": None, "model_type": f"polyhead_{model_type}"}
    holder = type(f"Polyhead{base.__name__}", (HoldsHeads, base), what)
    network = type(f"Polyhead{parent.__name__}", (_HasHeads, parent), {"__module__": __name__, "config_class": holder})
    AutoConfig.register(f"polyhead_{model_type}", holder)
    AutoModelForCausalLM.register(holder, network)
    globals().update({made.__name__: made for made in (holder, network)})
    return holder, network


def __getattr__(name: str) -> Any:
    """PolyheadLlamaConfig, PolyheadLlamaForCausalLM and so on, which are made when they are registered."""
    if name.startswith("Polyhead"):
        register()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _base_type(config: Any) -> str:
    return config.model_type.removeprefix("polyhead_")


def _hold(config: Any, layers: Layers) -> Any:
    """The configuration itself, of the class that holds heads: all that refer to it see them."""
    config.__class__ = _classes(_base_type(config))[0]
    config.polyhead_heads = [None if groups is None else [ours.to_dict(group) for group in groups] for groups in layers]
    vars(config).pop("_attn_implementation_internal", None)  # a property now
    return config


def _place(config: Any, bias: bool = False) -> Place:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Place(config.hidden_size, heads, kv_heads, dim, config.max_position_embeddings, bias)


def _attentions(model: nn.Module) -> list[Any]:
    """The attention module of every layer, in order.  ValueError unless each has projections of its own."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "layer_idx")
    found: list[Any] = [module for module in model.modules() if all(hasattr(module, part) for part in parts)]
    config: Any = model.config
    if [module.layer_idx for module in found] != list(range(config.num_hidden_layers)):
        who = type(model).__name__
        raise ValueError(f"polyhead: {who} must have q_proj, k_proj, v_proj and o_proj in each of its layers")
    return found


def _put(attention: Any, groups: Sequence[Mechanism], config: Any) -> None:
    """Give an attention module heads of its own."""
    weight = attention.v_proj.weight
    dtype = weight.dtype if weight.is_floating_point() else None  # a quantised one says nothing of its values
    place = _place(config, attention.v_proj.bias is not None)
    attention.polyhead = Heads(groups, place, device=weight.device, dtype=dtype).train(attention.training)
    if any(isinstance(group, SymbolHeads) for group in groups) and not hasattr(type(attention), "polyhead_stream"):
        kind: Any = type(attention)
        attention.__class__ = with_symbols(kind)
