"""The function that transformers' attention interface calls: our heads on queries, keys and values of its models.

Masks are those of SDPA.  Heads are only called as a module, so that wrappers (PEFT, torch.compile, FSDP) work.  What
relational heads read beside q, k and v comes by a hook before their attention module, `pass_stream`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.compat.foreign import limits
from polyhead.compat.heads import Groups, added
from polyhead.compat.huggingface.cache import CACHE_NAME
from polyhead.layers.call import LayerLimits, drawn_keep
from polyhead.layers.heads.functions import HeadGroup, attended
from polyhead.layers.heads.groups import build
from polyhead.layers.heads.symbolic import SymbolGroup, symbol_group
from polyhead.layers.projection import by_offset
from polyhead.ops.call import Masks
from polyhead.ops.latent_code import at_least_float32, share

SOFTMAX = build(configs.Softmax(1), 1, 1)
"""A group without parameters, for any number of heads."""

FromStream = dict[int, dict[str, Tensor]]
"""By the index of a group that reads more than q, k and v: its "q_rel" and "k_rel" (b t r p), and symbols, "v"
(b t g e) or a "table" by offset (n g e)."""


class Heads(Groups):
    """The head groups of one layer of a foreign model, with their own parameters and the layer's own symbols.

    Args:
        attention: The module that gives the heads their sizes; its `v_proj` gives their device and dtype.

    Raises:
        ValueError: For another number of heads, for a mechanism of other sizes or inputs than the model gives, for
            parameters beside a quantised `v_proj`, and for symbols beside a wrapped one.
    """

    def __init__(self, mechanisms: Sequence[configs.Mechanism], attention: Any) -> None:
        super().__init__()
        config, v_proj, like = attention.config, attention.v_proj, attention.v_proj.weight
        heads, num_heads = configs.total_heads(mechanisms), config.num_attention_heads
        if heads != num_heads:
            raise ValueError(f"heads: the model has {num_heads} heads, so give {num_heads}, got {heads}")
        # `num_sharing` query heads of the model read one head of keys.
        num_sharing, dim, first = attention.num_key_value_groups, attention.head_dim, 0
        fitted: configs.Heads = ()
        # For each group its heads, and its keys; None if the group's heads cut through a set that shares keys.
        self.slices: list[tuple[slice, slice | None]] = []
        for mechanism in mechanisms:
            last = first + mechanism.heads
            is_whole = first % num_sharing == 0 and last % num_sharing == 0
            kv_heads = mechanism.heads // num_sharing if is_whole else mechanism.heads
            fitted += (_fitted(mechanism, is_whole, dim=dim, value_dim=dim, kv_heads=kv_heads),)
            keys = slice(first // num_sharing, last // num_sharing) if is_whole else None
            self.slices.append((slice(first, last), keys))
            first = last
        # The entries of a quantised map are codes of its values: integers, or floating numbers of eight bits.
        is_quantised = not like.is_floating_point() or like.itemsize == 1
        dtype = None if is_quantised else like.dtype
        options = {"max_length": config.max_position_embeddings, "device": like.device, "dtype": dtype}
        self.add_groups(fitted, config.hidden_size, bias=v_proj.bias is not None, **options)
        # Parameters of heads need a dtype, and symbols the rows of v_proj, which a wrapped map does not have.
        has_rows = isinstance(v_proj, nn.Linear) and isinstance(like, nn.Parameter)
        if (is_quantised and list(self.parameters())) or (self.symbols and not has_rows):
            raise ValueError("heads: v_proj must be a plain linear layer: swap before adapters, quantisation")
        # Symbols are mapped by a copy of the value rows of their heads: a symbol begins as the value its token had.
        for group, (_, keys) in zip(self.groups, self.slices, strict=True):
            if not isinstance(group, SymbolGroup) or keys is None or group.symbol_dim != group.width:
                continue
            rows = slice(keys.start * group.sizes.value_dim, keys.stop * group.sizes.value_dim)
            with torch.no_grad():
                for name, parameter in group.value.named_parameters():
                    parameter.copy_(v_proj.get_parameter(name)[rows])
            if hasattr(group, "reset_parameters"):  # of the weights of relations, which depend on the map
                group.reset_parameters()  # type: ignore[operator]

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor | FromStream:
        """The output (b t h e) of all heads for q, k and v, or `FromStream` for the stream (b t m) alone."""
        if len(tensors) == 1:
            return self._from_stream(*tensors, **options)
        return self._attend(*tensors, **options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, limits: LayerLimits, relational: FromStream) -> Tensor:
        """The output for q (b t h d), k (b s g d) and v (b s g e), and what groups read beside them, without tables."""
        limits = dataclasses.replace(limits, bias=added("polyhead", self.groups, limits.bias))
        outputs = []
        for i, (group, (heads, keys)) in enumerate(zip(self.groups, self.slices, strict=True)):
            if keys is None:  # the group's heads cut through a set that shares keys: each head gets a copy
                tensors = {"k": share(k, q.shape[2])[:, :, heads], "v": share(v, q.shape[2])[:, :, heads]}
            else:
                tensors = {"k": k[:, :, keys], "v": v[:, :, keys], **relational.get(i, {})}
            tensors["q"] = q[:, :, heads]
            outputs.append(attended(group, limits.call(tensors, heads.start, heads.stop)))
        if len(outputs) == 1:  # needs no copy
            return outputs[0]
        return torch.cat(outputs, dim=2)  # (b t h d)

    def _from_stream(self, x: Tensor, *, first: int, positions: Tensor | None) -> FromStream:
        """What groups read of the stream x (b t m), whose first token has the index `first`."""
        symbols = [source(x, first=first, positions=positions) for source in self.symbols]
        from_stream: FromStream = {}
        for i, (group, source) in enumerate(zip(self.groups, self.source_of, strict=True)):
            if source is None:
                continue
            features = symbol_group(group).features(x)
            tensors = symbol_group(group).receive(features) | symbol_group(group).send(features)
            values = symbol_group(group).values(symbols[source])
            if values.ndim == 4:  # symbols by position may be shared by all sequences; a table by offset is
                tensors["v"] = values.expand(x.shape[0], -1, -1, -1)
            else:
                tensors["table"] = values
            from_stream[i] = tensors
        return from_stream


def _fitted(mechanism: configs.Mechanism, is_whole: bool, **fields: Any) -> configs.Mechanism:
    """The mechanism with the model's sizes.  Raises ValueError for other sizes, and for inputs that the model lacks."""
    name = type(mechanism).__name__
    for field, size in fields.items():
        if getattr(mechanism, field) not in (None, size):
            raise ValueError(f"heads: {field} of {name} must be {size} but is {getattr(mechanism, field)}")
    if mechanism.reads_all_queries:
        raise ValueError(f"heads: {name} must not read all queries, which a causal model hides")
    if mechanism.share or getattr(mechanism, "hidden", None) is not None:
        raise ValueError(f"heads: {name} must read the model's own queries and keys, without share or hidden")
    symbols = getattr(mechanism, "symbols", None)
    if symbols is not None and not is_whole:
        raise ValueError(f"heads: {name} must be together with all heads that share its keys")
    if isinstance(symbols, configs.RelationalSymbols):  # the cache keeps no neighbours
        raise ValueError(f"heads: {name} must have symbols of single tokens but has RelationalSymbols")
    return dataclasses.replace(mechanism, **fields)


class RelationalInputs:
    """Inputs of relational heads beside q, k and v in one call: the stream, symbols, and all relation keys.

    It takes the place of a cache: `update` appends relation keys and symbols to keys, so that any cache stores them.
    """

    def __init__(self, from_stream: FromStream, cache: Any, num_cached: int) -> None:
        self.from_stream, self.cache, self.num_cached = from_stream, cache, num_cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values to the cache and return all of them (b g s d), without what was appended."""
        # Caches store keys (b g s d) of any width.  So what else belongs to a token, x numbers, travels as more columns
        # of its keys: padded with zeros and cut into g parts.  In every call the parts are in the same order.
        by_token, columns, g = [], [key], key.shape[1]
        for tensors in self.from_stream.values():
            by_token += [(tensors, name) for name in ("k_rel", "v") if name in tensors]
        for tensors, name in by_token:
            joint = tensors[name].flatten(2)  # (b t x)
            joint = nn.functional.pad(joint, (0, -joint.shape[-1] % g))  # (b t g*y)
            columns.append(joint.unflatten(-1, (g, -1)).transpose(1, 2))  # (b g t y)
        key, value = self.cache.update(torch.cat(columns, dim=-1), value, layer, *args, **kwargs)
        key, *parts = key.split([part.shape[-1] for part in columns], dim=-1)  # (b g s d), and (b g s y) for each name
        for (tensors, name), part in zip(by_token, parts, strict=True):
            sizes = tensors[name].shape[2:]
            joint = part.transpose(1, 2).flatten(2)[..., : sizes.numel()]  # (b s x), without the zeros
            tensors[name] = joint.unflatten(-1, sizes)
        return key, value

    def by_group(self, t: int, s: int) -> FromStream:
        """By index of the group, q_rel of `t` receivers, and k_rel and symbols of the first `s` senders."""
        groups: FromStream = {}
        for i, tensors in self.from_stream.items():
            groups[i] = {name: tensor[:, :s] for name, tensor in tensors.items() if name != "table"}
            if "table" in tensors:
                # A cache of fixed size has empty places after the last token, one with a window fewer than came before.
                groups[i]["v"] = by_offset(tensors["table"], t, s, min(self.num_cached, s - t))
        return groups


def attend(
    heads: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    polyhead: RelationalInputs | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function of the interface, on (b h t d) tensors; returns (b t h e).

    Args:
        heads: Called like `Heads`.
        polyhead: What relational heads read beside q, k and v.
        softcap: The model's soft cap, for softmax heads; heads of other kinds have none.
        s_aux: The model's sinks, for softmax heads; heads of other kinds have none.

    Raises:
        ValueError: For options that the ops lack, and for packed sequences that no mask separates.
    """
    name = type(module).__name__
    # Options of some models beside softmax(q k + bias) over the mask; "cache" is a paged one.
    for option in ("sinks", "head_mask", "indices", "block_indices", "cache"):
        if options.get(option) is not None:
            raise ValueError(f"polyhead: {name} must be plain attention but {option} changes it")
    edges = options.get("cu_seq_lens_q")
    if attention_mask is None and edges is not None and len(edges) > 2:
        raise ValueError(f"polyhead: {name} needs position_ids that restart in each sequence, not only cu_seq_lens_q")

    # transformers has (b h t d), polyhead has (b t h d): views, no copies.
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (b t h d)
    b, t, h, d = q.shape

    # Without a mask query 0 is key 0, and further keys are empty rows of a static cache; a single query comes last.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_masked_by_order = attention_mask is None and bool(is_causal) and t > 1
    if is_masked_by_order:
        k, v = k[:, :t], v[:, :t]
    s = k.shape[1]
    masks = []
    for array in (attention_mask, position_bias):
        if array is not None and array.ndim != 4:
            raise ValueError(f"polyhead: a mask of {name} must be (b h t s) but is {tuple(array.shape)}")
        if array is not None:
            masks.append(array[..., :s])
    is_boolean = len(masks) == 1 and masks[0].dtype == torch.bool  # not read, which would synchronise the device
    bias, mask = (None, masks[0]) if is_boolean else limits(masks, t, s, q.dtype)
    keep = None
    if dropout > 0:
        keep = drawn_keep((b, h, t, s), dropout, device=q.device, dtype=at_least_float32(q.dtype))
    # Our ops multiply scores by d ** -0.5, so another scale goes into the queries.
    if scaling is not None and scaling != d**-0.5:
        q = q * (scaling * d**0.5)
    relational = {} if polyhead is None else polyhead.by_group(t, s)
    sinks = None if s_aux is None else s_aux.flatten()
    layer_limits = LayerLimits(bias, Masks(mask, is_masked_by_order), keep, softcap=softcap, sinks=sinks)
    return heads(q, k, v, limits=layer_limits, relational=relational).contiguous(), None


def alone(group: HeadGroup, q: Tensor, k: Tensor, v: Tensor, *, limits: LayerLimits, relational: object) -> Tensor:
    """The output of a group that has all heads of a layer and reads only q, k and v: called like `Heads`."""
    limits = dataclasses.replace(limits, bias=added("polyhead", [group], limits.bias))
    return group(limits.call({"q": q, "k": k, "v": v}, 0, q.shape[2]))


def pass_stream(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before an attention module: it passes the stream to the module's relational heads."""
    x = inputs[0] if inputs else options["hidden_states"]
    cache = options.get(CACHE_NAME)
    num_cached = 0 if cache is None else int(cache.get_seq_length(module.layer_idx))
    from_stream = module.polyhead(x, first=num_cached, positions=options.get("position_ids"))
    relational = RelationalInputs(from_stream, cache, num_cached)
    # The module calls `update` of what it takes for the cache, and so hands us its keys and values.
    if cache is not None:
        options = {**options, CACHE_NAME: relational}
    return inputs, {**options, "polyhead": relational}
