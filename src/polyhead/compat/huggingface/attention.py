"""The function that transformers' attention interface calls: our heads on queries, keys and values of its models.

    attend(module, query, key, value, attention_mask, dropout=, scaling=, ...) -> (b t h e), None

One function serves the names of `heads.NAMES` (one mechanism in all layers) and layers whose attention module has its
own `Heads`.  Masks are those of SDPA: Boolean, True where a query may attend, or floating and added to the scores; no
mask in a causal module means the causal mask.

Relational heads read more than q, k and v.  Their attention module is a subclass (`with_symbols`) that passes the
stream to the heads.  In place of the cache it passes `RelationalInputs`, which puts symbols in place of values and
appends relation keys to the keys; so any cache of transformers stores them.

Heads are only called as a module, so that wrappers (PEFT, torch.compile, FSDP) work.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead import config
from polyhead.compat.foreign import limits
from polyhead.compat.heads import Groups, added
from polyhead.compat.huggingface.base import CACHE_NAME
from polyhead.compat.huggingface.taps import EAGER, REFUSED, causal, masks
from polyhead.layers.call import LayerLimits, drawn_keep
from polyhead.layers.heads.functions import HeadGroup, asked, attended
from polyhead.layers.heads.symbolic import SymbolGroup
from polyhead.layers.projection import by_offset
from polyhead.ops.call import AttentionCall
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
    who: str, mechanisms: Sequence[config.Mechanism], place: LayerSizes
) -> list[tuple[config.Mechanism, Slices]]:
    """The mechanisms with the model's sizes, and which of the model's heads each of them replaces.

    Raises ValueError if the numbers of heads differ, or if a mechanism needs more than the model's q, k and v.
    """
    total = sum(mechanism.heads for mechanism in mechanisms)
    if total != place.heads:
        raise ValueError(f"{who}: {place.heads} heads were wanted but {total} came")
    shared, found, first = place.heads // place.kv_heads, [], 0
    for mechanism in mechanisms:
        name, last = type(mechanism).__name__, first + mechanism.heads
        whole = first % shared == 0 and mechanism.heads % shared == 0
        kv_heads = mechanism.heads // shared if whole else mechanism.heads
        for field, wanted in (("dim", place.dim), ("value_dim", place.dim), ("kv_heads", kv_heads)):
            if getattr(mechanism, field) not in (None, wanted):
                raise ValueError(f"{who}: {field} of {name} must be {wanted} but is {getattr(mechanism, field)}")
        if mechanism.share or getattr(mechanism, "hidden", None) is not None:
            raise ValueError(f"{who}: {name} must read the model's own queries and keys, without share or hidden")
        if isinstance(mechanism, config.SymbolHeads):
            if not whole:
                raise ValueError(f"{who}: {name} must be a multiple of {shared} heads, which share keys")
            if isinstance(mechanism.symbols, config.RelationalSymbols):
                raise ValueError(f"{who}: {name} must have symbols of single tokens but has RelationalSymbols")
        keys = slice(first // shared, last // shared) if whole else None
        mechanism = dataclasses.replace(mechanism, dim=place.dim, value_dim=place.dim, kv_heads=kv_heads)
        found.append((mechanism, (slice(first, last), keys)))
        first = last
    return found


class Heads(Groups):
    """The head groups of one layer of a foreign model, with their own parameters.

    Softmax, linear and HYLA heads have none (HYLA with `value_depth=2`: its second value matrix).  Relational heads
    have their maps and, for each of their sources, the layer's own symbols.
    """

    def __init__(
        self,
        mechanisms: Sequence[config.Mechanism],
        place: LayerSizes,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        pairs = fitted("heads", mechanisms, place)
        self.width, self.slices = place.width, [where for _, where in pairs]
        self.add_groups(
            "heads",
            tuple(mechanism for mechanism, _ in pairs),
            place.width,
            bias=place.bias,
            max_length=place.max_length,
            causal=True,
            device=device,
            dtype=dtype,
        )

    @torch.no_grad()
    def begin(self, v_proj: nn.Module, *, maps: bool = False) -> None:
        """Initialise parameters that no checkpoint has filled.

        The map of symbols copies the value rows of these heads, relations are balanced accordingly, and all else is
        initialised as in our own models.  `maps`: linear maps are drawn anew, because transformers has filled them by
        its own rule.  Raises ValueError if `v_proj` is wrapped or quantised, so that it has no such rows."""
        for module in self.modules():
            if maps and isinstance(module, nn.Linear) and _fresh(module.weight):
                module.reset_parameters()
        for group, (_, keys) in zip(self.own_groups(), self.slices, strict=True):
            if not isinstance(group, SymbolGroup) or keys is None or group.symbol_dim != self.width:
                continue
            rows = slice(keys.start * group.sizes.value_dim, keys.stop * group.sizes.value_dim)
            for name, parameter in group.value.named_parameters():
                if _fresh(parameter):
                    parameter.copy_(_values(v_proj, name)[rows])
        for module in self.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if hasattr(module, "reset_parameters") and not isinstance(module, nn.Linear) and any(map(_fresh, own)):
                module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        q: Float[Tensor, "b t *width"],
        k: Float[Tensor, "b s g d"] | None = None,
        v: Float[Tensor, "b s g e"] | None = None,
        *,
        seen: LayerLimits | None = None,
        made: list[dict[str, Tensor]] | None = None,
        first: int = 0,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"] | FromStream:
        """The output of all heads; `seen`: bias, mask, causal and keep for all of them; `made`: see
        `RelationalInputs.made`.

        Without k and v it returns `FromStream` for the stream `q` (b t m), whose first token has the index `first`.
        """
        if k is None or v is None:
            return self._from_stream(q, first, positions)
        parts, seen = [], seen or LayerLimits()
        seen = dataclasses.replace(seen, bias=added("polyhead", self.own_groups(), seen.bias))
        for i, (group, (heads, keys)) in enumerate(zip(self.own_groups(), self.slices, strict=True)):
            # If a group's heads cut through a set that shares keys, each head gets a copy.
            mine = [x[:, :, keys] if keys is not None else share(x, q.shape[2])[:, :, heads] for x in (k, v)]
            more = {} if made is None else made[i]
            if made is None and self.source_of[i] is not None:
                raise ValueError("heads: relational heads need the stream but their layer did not give it")
            given = {"v": mine[1], **more, "q": q[:, :, heads], "k": mine[0]}
            parts.append(attended(group, seen.call(given, heads.start, heads.stop)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _from_stream(self, x: Tensor, first: int, positions: Tensor | None) -> FromStream:
        symbols, streamed = [source(x, first=first, positions=positions) for source in self.symbols], []
        for group, source, (_, keys) in zip(self.groups, self.source_of, self.slices, strict=True):
            of_group: dict[str, Any] = {}
            if source is not None and keys is not None:
                f = asked(group, "features")(x)
                sent = asked(group, "send")(f)  # empty for an Abstractor
                of_group = {"received": asked(group, "receive")(f), **sent, "keys": (keys.start, keys.stop)}
                of_group["values"] = asked(group, "values")(symbols[source])
            streamed.append(of_group)
        return streamed


def _fresh(tensor: Tensor) -> bool:
    return not getattr(tensor, "_is_hf_initialized", False)  # transformers sets this mark on loaded parameters


def quantised(weight: Tensor) -> bool:
    """Whether the entries of a weight are codes of its values: integers, or floating numbers of eight bits."""
    return not weight.is_floating_point() or weight.dtype.itemsize == 1


def _values(v_proj: nn.Module, name: str) -> Tensor:
    if not isinstance(v_proj, nn.Linear) or quantised(v_proj.weight):
        kind, dtype = type(v_proj).__name__, getattr(getattr(v_proj, "weight", None), "dtype", "no weight")
        wanted = "a linear v_proj was wanted, whose rows the map of symbols copies"
        raise ValueError(f"heads: {wanted}, but a {kind} of {dtype} came: swap before adapters and quantisation")
    return v_proj.get_parameter(name)


class RelationalInputs:
    """Inputs of relational heads beside q, k and v in one call: the stream, symbols, and all relation keys.

    It takes the place of a cache: `update` stores symbols as values, and appends relation keys to each key.
    """

    def __init__(self, streamed: FromStream, cache: Any, past: int) -> None:
        self.streamed, self.cache, self.past = streamed, cache, past
        self.kept = False
        self.keys = {i: of["k_rel"] for i, of in enumerate(streamed) if "k_rel" in of}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values to the cache and return all of them (b g s d), without the appended relation keys.

        Raises ValueError for a cache that other code has filled.
        """
        g, d = key.shape[1], key.shape[-1]
        flat = [related.flatten(2) for related in self.keys.values()]
        if flat:
            joint = torch.cat(flat, dim=-1)
            joint = nn.functional.pad(joint, (0, -joint.shape[-1] % g))
            key = torch.cat((key, joint.unflatten(-1, (g, -1)).transpose(1, 2)), dim=-1)
            held = getattr(self.cache.layers[layer], "keys", None) if self.past else None
            if held is not None and held.numel() and held.shape[-1] != key.shape[-1]:  # as of PEFT's prefix tuning
                wanted = f"a cache whose keys have those of relations beside them (width {key.shape[-1]}) was wanted"
                raise ValueError(f"heads: {wanted} but keys of width {held.shape[-1]} came")
        value = self.filled(value.transpose(1, 2)).transpose(1, 2)
        key, value = self.cache.update(key, value, layer, *args, **kwargs)
        self.kept = True
        if flat:
            joint = key[..., d:].transpose(1, 2).flatten(2)
            widths = [piece.shape[-1] for piece in flat]
            pieces = joint[..., : sum(widths)].split(widths, dim=-1)
            shapes = [related.shape[2:] for related in self.keys.values()]
            self.keys = {i: p.unflatten(-1, shape) for i, p, shape in zip(self.keys, pieces, shapes, strict=True)}
        return key[..., :d], value

    def filled(self, value: Float[Tensor, "b t g e"]) -> Float[Tensor, "b t g e"]:
        """Values, with symbols by key in place of the values of relational heads."""
        value = value.clone()
        for of in self.streamed:
            if of and of["values"].ndim == 4:
                value[:, :, slice(*of["keys"])] = of["values"]
        return value

    def made(self, t: int, s: int) -> list[dict[str, Tensor]]:
        """For each group, q_rel of `t` receivers, k_rel of the first `s` senders, and symbols by offset."""
        found: list[dict[str, Tensor]] = []
        for i, of in enumerate(self.streamed):
            made = dict(of.get("received", {}))
            if i in self.keys:
                made["k_rel"] = self.keys[i][:, :s]
            if of and of["values"].ndim == 3:
                # A cache of fixed size has empty places after the last token, one with a window fewer than came before.
                made["v"] = by_offset(of["values"], t, s, min(self.past, s - t))
            found.append(made)
        return found


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
    **options: Any,
) -> tuple[Tensor, None]:
    """The function of the interface, on (b h t d) tensors; returns (b t h e).

    `heads` is a module that is called like `Heads`, possibly wrapped.  Raises ValueError for options that the ops lack.
    """
    who = type(module).__name__
    check_options(module, options, attention_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if polyhead is not None and not polyhead.kept:
        v = polyhead.filled(v)
    t, d = q.shape[1], q.shape[3]
    eager = type(getattr(module, "config", None)) in EAGER
    one_way = causal(module, is_causal, eager=eager) and attention_mask is None and t > 1
    if one_way:  # then query 0 is key 0, and further keys are empty rows of a static cache
        k, v = k[:, :t], v[:, :t]
    given = masks(f"polyhead: a mask of {who}", (attention_mask, position_bias), k.shape[1])
    unread = len(given) == 1 and given[0].dtype == torch.bool  # not read, because that would synchronise the device
    bias, mask = (None, given[0]) if unread else limits(given, t, k.shape[1], q.dtype)
    keep = None
    if dropout > 0:
        shape = q.shape[0], q.shape[2], t, k.shape[1]
        keep = drawn_keep(shape, dropout, device=q.device, dtype=at_least_float32(q.dtype))
    if scaling is not None and scaling != d**-0.5:
        q = q * (scaling * d**0.5)
    made = None if polyhead is None else polyhead.made(t, k.shape[1])
    return heads(q, k, v, seen=LayerLimits(bias, mask, keep, one_way), made=made).contiguous(), None


def alone(group: HeadGroup) -> Callable[..., Tensor]:
    """Wrap a group that has all heads of a layer and reads only q, k and v, to be called like `Heads`."""

    def heads(q: Tensor, k: Tensor, v: Tensor, *, seen: LayerLimits, made: None) -> Tensor:
        bias = added("polyhead", [group], seen.bias)
        return group(AttentionCall(q, k, v, bias, seen.mask, seen.keep, seen.causal))

    return heads


def check_options(module: nn.Module, options: Mapping[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError for options of some models' attention that the ops do not have, and for packed sequences that
    no mask separates."""
    for option in (*REFUSED, "cache"):  # a paged cache, which the attention function would have to manage
        if options.get(option) is not None:
            raise ValueError(f"polyhead: {type(module).__name__} must be plain attention but {option} changes it")
    who, edges = type(module).__name__, options.get("cu_seq_lens_q")
    if options.get("output_attentions"):
        raise ValueError(f"polyhead: {who} hands out no attentions but output_attentions=True came")
    if mask is None and edges is not None and len(edges) > 2:
        raise ValueError(f"polyhead: {who} must get position_ids that restart in each sequence, not only cu_seq_lens_q")


class _Stream:
    """Mixin of an attention module's class: it passes the stream to relational heads."""

    polyhead: nn.Module
    layer_idx: int
    polyhead_stream = True

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE_NAME)
        past = 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
        streamed = self.polyhead(hidden_states, first=past, positions=kwargs.get("position_ids"))
        senders = RelationalInputs(streamed, cache, past)
        if cache is not None:
            kwargs[CACHE_NAME] = senders
        return super().forward(hidden_states, *args, polyhead=senders, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, which cannot find a class that is made when heads are swapped."""
        kinds = type(self).__mro__
        return _empty, (kinds[kinds.index(_Stream) + 1],), self.__getstate__()


@functools.cache
def with_symbols(kind: Any) -> Any:
    """The subclass of an attention module's class that passes the stream to relational heads."""
    return type(f"Polyhead{kind.__name__}", (_Stream, kind), {"__module__": __name__})


def _empty(kind: Hashable) -> nn.Module:
    """An attention module `with_symbols`, whose state pickle sets."""
    made: type[nn.Module] = with_symbols(kind)
    return made.__new__(made)
