"""The function that transformers' attention interface calls: our heads on queries, keys and values of its models.

    attend(module, query, key, value, attention_mask, dropout=, scaling=, ...) -> (b t h e), None

One function serves the names of `heads.NAMES` (one mechanism in all layers) and layers whose attention module has its
own `Heads`.  Masks are those of SDPA; no mask in a causal module means the causal mask.  Heads are only called as a
module, so that wrappers (PEFT, torch.compile, FSDP) work.

Relational heads read more than q, k and v.  Their attention module is a subclass (`with_symbols`) that passes the
stream to the heads.  In place of the cache it passes `RelationalInputs`, which puts symbols in place of values and
appends relation keys to the keys; so any cache of transformers stores them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead import config
from polyhead.compat.foreign import limits
from polyhead.compat.heads import Groups, added
from polyhead.compat.huggingface.base import CACHE_NAME
from polyhead.compat.huggingface.taps import EAGER, REFUSED, flat, is_causal_without_mask, masks
from polyhead.layers.call import LayerLimits, drawn_keep
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import HeadGroup, asked, attended
from polyhead.layers.heads.symbolic import SymbolGroup
from polyhead.layers.projection import by_offset
from polyhead.ops.latent_code import at_least_float32, share

Slices = tuple[slice, slice | None]
"""For a group: its heads, and its keys and values; None if the group's heads cut through a set that shares keys."""

FromStream = list[dict[str, Any]]
"""For each group, its tensors from the stream: "received" (by name), "k_rel" (b t r p), "values" (b t g e) or a table
by offset (n g e), and "keys", the range of its keys.  Empty for heads that read only q, k and v."""


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer of a foreign model: heads, groups of keys, `dim` per head, and the model width."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    max_length: int = 512
    bias: bool = False


def fitted(
    caller: str, mechanisms: Sequence[config.Mechanism], sizes: LayerSizes
) -> list[tuple[config.Mechanism, Slices]]:
    """The mechanisms with the model's sizes, and which of the model's heads each of them replaces.

    Raises ValueError if the numbers of heads differ, or if a mechanism needs more than the model's q, k and v.
    """
    total = sum(mechanism.heads for mechanism in mechanisms)
    if total != sizes.heads:
        raise ValueError(f"{caller}: the model has {sizes.heads} heads, so give {sizes.heads}, got {total}")
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"{caller}: {sizes.heads} heads cannot share {sizes.kv_heads} heads of keys and values")
    # `num_sharing` query heads of the model read one head of keys.
    num_sharing = sizes.heads // sizes.kv_heads
    first, pairs = 0, []
    for mechanism in mechanisms:
        name, last = type(mechanism).__name__, first + mechanism.heads
        # Groups keep the sharing of keys unless their heads cut through a set that shares keys.
        is_whole = first % num_sharing == 0 and mechanism.heads % num_sharing == 0
        kv_heads = mechanism.heads // num_sharing if is_whole else mechanism.heads
        fields: dict[str, Any] = {"dim": sizes.dim, "value_dim": sizes.dim, "kv_heads": kv_heads}
        for field, size in fields.items():
            if getattr(mechanism, field) not in (None, size):
                raise ValueError(f"{caller}: {field} of {name} must be {size} but is {getattr(mechanism, field)}")
        if mechanism.share or getattr(mechanism, "hidden", None) is not None:
            raise ValueError(f"{caller}: {name} must read the model's own queries and keys, without share or hidden")
        if isinstance(mechanism, config.SymbolHeads):
            if not is_whole:
                raise ValueError(f"{caller}: {name} must be a multiple of {num_sharing} heads, which share keys")
            if isinstance(mechanism.symbols, config.RelationalSymbols):  # the cache keeps no neighbours
                raise ValueError(f"{caller}: {name} must have symbols of single tokens but has RelationalSymbols")
        keys = slice(first // num_sharing, last // num_sharing) if is_whole else None
        pairs.append((dataclasses.replace(mechanism, **fields), (slice(first, last), keys)))
        first = last
    return pairs


class Heads(Groups):
    """The head groups of one layer of a foreign model, with their own parameters and the layer's own symbols."""

    def __init__(
        self, mechanisms: Sequence[config.Mechanism], sizes: LayerSizes, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        with_sizes, self.slices = zip(*fitted("heads", mechanisms, sizes), strict=True)
        self.width, bias, length = sizes.width, sizes.bias, sizes.max_length
        self.add_groups("heads", with_sizes, self.width, bias=bias, max_length=length, causal=True, **placement)

    @torch.no_grad()
    def begin(self, v_proj: nn.Module, *, maps: bool = False) -> None:
        """Initialise parameters that no checkpoint has filled.

        The map of symbols copies the value rows of these heads.  `maps`: linear maps are drawn anew, because
        transformers has filled them by its own rule.  Raises ValueError if `v_proj` is wrapped or quantised, so that it
        has no such rows.
        """
        for module in self.modules():
            if maps and isinstance(module, nn.Linear) and _is_fresh(module.weight):
                module.reset_parameters()
        for group, (_, keys) in zip(self.groups, self.slices, strict=True):
            if not isinstance(group, SymbolGroup) or keys is None or group.symbol_dim != self.width:
                continue
            rows = slice(keys.start * group.sizes.value_dim, keys.stop * group.sizes.value_dim)
            for name, parameter in group.value.named_parameters():
                if not _is_fresh(parameter):
                    continue
                if not isinstance(v_proj, nn.Linear) or is_quantised(v_proj.weight):
                    raise ValueError(
                        "heads: symbols copy rows of v_proj, which must be a plain linear layer: "
                        "swap before adapters and quantisation"
                    )
                # A symbol then begins as the value that its token had.
                parameter.copy_(v_proj.get_parameter(name)[rows])
        for module in self.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            resets = hasattr(module, "reset_parameters") and not isinstance(module, nn.Linear)
            if resets and any(map(_is_fresh, tensors)):
                module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        q: Float[Tensor, "b t *width"],
        k: Float[Tensor, "b s g d"] | None = None,
        v: Float[Tensor, "b s g e"] | None = None,
        *,
        limits: LayerLimits | None = None,
        relational: list[dict[str, Tensor]] | None = None,
        first: int = 0,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"] | FromStream:
        """The output of all heads; `relational`: for each group, tensors that q, k and v do not give.

        Without k and v it returns `FromStream` for the stream `q` (b t m), whose first token has the index `first`.
        """
        if k is None or v is None:
            return self._from_stream(q, first, positions)
        limits = limits or LayerLimits()
        limits = dataclasses.replace(limits, bias=added("polyhead", self.groups, limits.bias))
        outputs = []
        for i, (group, (heads, keys)) in enumerate(zip(self.groups, self.slices, strict=True)):
            tensors = {"q": q[:, :, heads]}
            if keys is None:  # the group's heads cut through a set that shares keys: each head gets a copy
                tensors |= {"k": share(k, q.shape[2])[:, :, heads], "v": share(v, q.shape[2])[:, :, heads]}
            else:
                tensors |= {"k": k[:, :, keys], "v": v[:, :, keys]}
            if relational is not None:
                tensors |= relational[i]
            outputs.append(attended(group, limits.call(tensors, heads.start, heads.stop)))
        if len(outputs) == 1:
            return outputs[0]  # one group needs no copy
        return torch.cat(outputs, dim=2)

    def _from_stream(self, x: Tensor, first: int, positions: Tensor | None) -> FromStream:
        symbols = [source(x, first=first, positions=positions) for source in self.symbols]
        from_stream = []
        for group, source, (_, keys) in zip(self.groups, self.source_of, self.slices, strict=True):
            tensors: dict[str, Any] = {}
            if source is not None and keys is not None:
                features = asked(group, "features")(x)
                tensors["received"] = asked(group, "receive")(features)
                tensors |= asked(group, "send")(features)  # empty for an Abstractor
                tensors["keys"] = (keys.start, keys.stop)
                tensors["values"] = asked(group, "values")(symbols[source])
            from_stream.append(tensors)
        return from_stream


def _is_fresh(tensor: Tensor) -> bool:
    return not getattr(tensor, "_is_hf_initialized", False)  # transformers sets this mark on loaded parameters


def is_quantised(weight: Tensor) -> bool:
    """Whether the entries of a weight are codes of its values: integers, or floating numbers of eight bits."""
    return not weight.is_floating_point() or weight.dtype.itemsize == 1


class RelationalInputs:
    """Inputs of relational heads beside q, k and v in one call: the stream, symbols, and all relation keys.

    It takes the place of a cache: `update` stores symbols as values, and appends relation keys to each key.
    """

    def __init__(self, from_stream: FromStream, cache: Any, num_cached: int) -> None:
        self.from_stream, self.cache, self.num_cached = from_stream, cache, num_cached
        self.is_updated = False
        self.relation_keys = {i: tensors["k_rel"] for i, tensors in enumerate(from_stream) if "k_rel" in tensors}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values to the cache and return all of them (b g s d), without the appended relation keys."""
        g, d = key.shape[1], key.shape[-1]
        # Caches of transformers store keys (b g s d) as they come, of any width: relation keys travel as more columns.
        # They are cut into g parts, so that each head of keys takes as many; zeros fill the last part.
        by_group = [keys.flatten(2) for keys in self.relation_keys.values()]
        if by_group:
            joint = torch.cat(by_group, dim=-1)
            joint = nn.functional.pad(joint, (0, -joint.shape[-1] % g))
            key = torch.cat((key, joint.unflatten(-1, (g, -1)).transpose(1, 2)), dim=-1)
        # A cache stores one value for each key, and relational heads read symbols in its place.
        value = self.with_symbols(value.transpose(1, 2)).transpose(1, 2)
        key, value = self.cache.update(key, value, layer, *args, **kwargs)
        self.is_updated = True
        if by_group:
            widths = [keys.shape[-1] for keys in by_group]
            joint = key[..., d:].transpose(1, 2).flatten(2)[..., : sum(widths)]
            for i, keys in zip(list(self.relation_keys), joint.split(widths, dim=-1), strict=True):
                self.relation_keys[i] = keys.unflatten(-1, self.relation_keys[i].shape[2:])
        return key[..., :d], value

    def with_symbols(self, value: Float[Tensor, "b t g e"]) -> Float[Tensor, "b t g e"]:
        """Values, with symbols by key in place of the values of relational heads."""
        value = value.clone()
        for tensors in self.from_stream:
            if tensors and tensors["values"].ndim == 4:
                value[:, :, slice(*tensors["keys"])] = tensors["values"]
        return value

    def by_group(self, t: int, s: int) -> list[dict[str, Tensor]]:
        """For each group, q_rel of `t` receivers, k_rel of the first `s` senders, and symbols by offset."""
        groups: list[dict[str, Tensor]] = []
        for i, tensors in enumerate(self.from_stream):
            group = dict(tensors.get("received", {}))
            if i in self.relation_keys:
                group["k_rel"] = self.relation_keys[i][:, :s]
            if tensors and tensors["values"].ndim == 3:
                # A cache of fixed size has empty places after the last token, one with a window fewer than came before.
                group["v"] = by_offset(tensors["values"], t, s, min(self.num_cached, s - t))
            groups.append(group)
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

    `heads` is called like `Heads`.  Its softmax heads get the model's soft cap and sinks; heads of other kinds have
    neither.  Raises ValueError for options that the ops lack.
    """
    check_options(module, options, attention_mask)
    # transformers has (b h t d), polyhead has (b t h d): views, no copies.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if polyhead is not None and not polyhead.is_updated:
        v = polyhead.with_symbols(v)
    t, d = q.shape[1], q.shape[3]

    # Without a mask query 0 is key 0, and further keys are empty rows of a static cache.
    is_eager = type(getattr(module, "config", None)) in EAGER
    is_masked_by_order = attention_mask is None and is_causal_without_mask(module, is_causal, t, eager=is_eager)
    if is_masked_by_order:
        k, v = k[:, :t], v[:, :t]
    added_masks = masks(f"polyhead: a mask of {type(module).__name__}", (attention_mask, position_bias), k.shape[1])
    if len(added_masks) == 1 and added_masks[0].dtype == torch.bool:
        bias: Tensor | None = None
        mask: Tensor | None = added_masks[0]  # not read, because that would synchronise the device
    else:
        bias, mask = limits(added_masks, t, k.shape[1], q.dtype)
    keep = None
    if dropout > 0:
        shape = q.shape[0], q.shape[2], t, k.shape[1]
        keep = drawn_keep(shape, dropout, device=q.device, dtype=at_least_float32(q.dtype))
    # Our ops multiply scores by d ** -0.5, so another scale goes into the queries.
    if scaling is not None and scaling != d**-0.5:
        q = q * (scaling * d**0.5)
    relational = None if polyhead is None else polyhead.by_group(t, k.shape[1])
    layer_limits = LayerLimits(bias, mask, keep, is_masked_by_order, softcap=softcap, sinks=flat(s_aux))
    return heads(q, k, v, limits=layer_limits, relational=relational).contiguous(), None


def alone(group: HeadGroup) -> Callable[..., Tensor]:
    """Wrap a group that has all heads of a layer and reads only q, k and v, to be called like `Heads`."""

    def heads(q: Tensor, k: Tensor, v: Tensor, *, limits: LayerLimits, relational: None) -> Tensor:
        limits = dataclasses.replace(limits, bias=added("polyhead", [group], limits.bias))
        return group(limits.call({"q": q, "k": k, "v": v}, 0, q.shape[2]))

    return heads


def check_options(module: nn.Module, options: Mapping[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError for options that the ops lack, and for packed sequences that no mask separates."""
    name = type(module).__name__
    for option in (*REFUSED, "cache"):  # a paged cache, which the attention function would have to manage
        if options.get(option) is not None:
            raise ValueError(f"polyhead: {name} must be plain attention but {option} changes it")
    if options.get("output_attentions"):
        raise ValueError(f"polyhead: {name} returns no attentions, so output_attentions must be False")
    edges = options.get("cu_seq_lens_q")
    if mask is None and edges is not None and len(edges) > 2:
        raise ValueError(f"polyhead: {name} needs position_ids that restart in each sequence, not only cu_seq_lens_q")


class _Stream:
    """Mixin of an attention module's class: it passes the stream to relational heads."""

    polyhead: nn.Module
    layer_idx: int
    polyhead_stream = True

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE_NAME)
        num_cached = 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
        from_stream = self.polyhead(hidden_states, first=num_cached, positions=kwargs.get("position_ids"))
        inputs = RelationalInputs(from_stream, cache, num_cached)
        # The parent class calls `update` of what it takes for the cache, and so hands us its keys and values.
        if cache is not None:
            kwargs[CACHE_NAME] = inputs
        return super().forward(hidden_states, *args, polyhead=inputs, **kwargs)  # type: ignore[misc]


@functools.cache
def with_symbols(kind: Any) -> Any:
    """The subclass of an attention module's class that passes the stream to relational heads."""
    return type(f"Polyhead{kind.__name__}", (_Stream, kind), {"__module__": __name__})
