"""Our settings as arguments of the package `dual-attention`: the inverse of reading them, and how it is checked.

The arguments are written and then read again.  If the result differs from the settings, the package has no such model,
and the error names the field.
"""

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any

from polyhead import config
from polyhead.compat.dual_attention.arguments import (
    FEEDFORWARD_ACTS,
    KINDS,
    NEIGHBOURS,
    NORMS,
    RELATION_ACTS,
    RETRIEVERS,
    SYMBOLIC,
)
from polyhead.spec.numbers import swiglu_width

Arguments = dict[str, Any]
"""Arguments of a constructor of the package, by name."""

Biases = Set[tuple[str, str]]
"""Which biases there are, by side ("", "encoder", "decoder") and module: "sa.kv", "sa.out", ..."""


def arguments(settings: config.TransformerConfig, biases: Biases) -> Arguments:
    """The arguments of the package's constructor for `plain` settings."""
    if settings.encoder is not None:
        return _sequence(settings, biases)
    if isinstance(settings.inputs, config.Patches):
        return _vision(settings, biases)
    if isinstance(settings.inputs, config.Tokens) and isinstance(settings.outputs, config.Logits):
        return _language(settings, biases)
    ends = type(settings.inputs).__name__, type(settings.outputs).__name__
    raise ValueError("the package has no model from {} to {}".format(*ends))


def _language(settings: config.TransformerConfig, biases: Biases) -> Arguments:
    own = _block(settings, biases, dual := _dual(settings))
    assert isinstance(settings.inputs, config.Tokens)
    del own["causal"]
    found = {"vocab_size": settings.inputs.count, **_sizes(settings), "max_block_size": settings.max_length}
    found["pos_enc_type"] = "pos_emb" if isinstance(settings.positions, config.Learned) else "RoPE"
    if dual:
        source = _source(settings)
        found |= _retriever(source, settings)
        tied = isinstance(source, config.SymbolicAttention) and source.tied
        found["symbol_retriever_config"] = {"shared_symbol_retriever": source.shared, "weight_tie_symbol_library": tied}
    elif kwargs := own.pop("attn_kwargs", None):
        own["block_kwargs"] = {"attn_kwargs": kwargs}
    return found | own


def _vision(settings: config.TransformerConfig, biases: Biases) -> Arguments:
    own, inputs = _block(settings, biases, dual := _dual(settings)), settings.inputs
    assert isinstance(inputs, config.Patches)
    for name in ("causal", "share_attn_params"):
        if own.pop(name, None):
            raise ValueError(f"the package's vision models have no {name}")
    (c, height, width), patch = inputs.image, inputs.patch
    outputs = settings.outputs
    found = {
        "image_shape": [c, width, height],
        "patch_size": [patch[1], patch[0]],
        "num_classes": getattr(outputs, "count", 1),
        "pool": {"class": "cls"}.get(getattr(outputs, "pool", "mean"), "mean"),
        **_sizes(settings),
    }
    return found | own | (_retriever(_source(settings), settings) if dual else {})


def _sequence(settings: config.TransformerConfig, biases: Biases) -> Arguments:
    encoder = settings.encoder
    if not isinstance(encoder, config.TransformerConfig):
        raise ValueError(f"the package has no encoder like {type(encoder).__name__}")
    dual = _dual(settings) or _dual(encoder)
    found = {
        "input_spec": _spec(encoder),
        "output_spec": _spec(settings),
        "d_model": settings.dim,
        "out_dim": settings.outputs.count if isinstance(settings.outputs, config.Logits) else 1,
        "n_layers_enc": encoder.layers,
        "n_layers_dec": settings.layers,
        "encoder_kwargs": _block(encoder, biases, dual, "encoder"),
        "decoder_kwargs": _block(settings, biases, dual, "decoder"),
        "in_block_size": encoder.max_length,
        "out_block_size": settings.max_length,
        "tie_weights": False,  # even with True the package does not tie them
    }
    side = settings if _dual(settings) else encoder
    return found | (_retriever(_source(side), side) if dual else {})


def _sizes(settings: config.TransformerConfig) -> Arguments:
    return {"d_model": settings.dim, "n_layers": settings.layers}


def _spec(settings: config.TransformerConfig) -> Arguments:
    if isinstance(settings.inputs, config.Tokens):
        return {"type": "token", "vocab_size": settings.inputs.count}
    if isinstance(settings.inputs, config.Vectors):
        return {"type": "vector", "dim": settings.inputs.size}
    raise ValueError(f"the package reads no {type(settings.inputs).__name__} into words")


# --------------------------------------------------------------------------------------------------------------- blocks
def _split(heads: config.Heads) -> tuple[config.Softmax | None, config.SymbolHeads | None]:
    """The group of sensory heads and the group of relational heads, or None."""
    sa = heads[0] if isinstance(heads[0], config.Softmax) else None
    rest = heads if sa is None else heads[1:]
    relational = (config.Relational, config.Disentangled, config.Abstractor)
    if len(rest) > 1 or not all(isinstance(group, relational) for group in rest):
        names = ", ".join(type(group).__name__ for group in heads)
        raise ValueError(f"heads must be Softmax, then heads with symbols, each at most once, but are {names}")
    return sa, rest[0] if rest else None  # type: ignore[return-value]


def _dual(settings: config.TransformerConfig) -> bool:
    return _split(settings.layer_heads(0))[1] is not None


def _block(settings: config.TransformerConfig, biases: Biases, dual: bool, side: str = "") -> Arguments:
    """The arguments of a block: the common ones, then those for blocks with (`dual`) or without relational heads."""
    found: Arguments = _feedforward(settings)
    found["dropout_rate"] = settings.dropout
    found["norm_first"] = settings.norm_order == "pre"
    found["norm_type"] = next(theirs for theirs, ours in NORMS.items() if ours == settings.norm)
    found["causal"] = settings.causal
    if cross := settings.layer_cross_heads(0):
        if len(cross) > 1 or not isinstance(cross[0], config.Softmax):
            raise ValueError("cross_heads must be one group, Softmax")
        found["n_heads_cross"] = cross[0].heads
    if dual:
        return found | _dual_block(settings, biases, side)
    # Without relational heads one argument is for the biases of the feed-forward layer and of both output projections.
    found["bias"] = found["bias"] or not biases.isdisjoint({(side, "sa.out"), (side, "cross.out")})
    return found | _softmax_block(settings, biases, side)


def _width(settings: config.TransformerConfig) -> int:
    """The default width of a head."""
    return settings.dim // sum(group.heads for group in settings.layer_heads(0))


def _softmax_block(settings: config.TransformerConfig, biases: Biases, side: str) -> Arguments:
    """The arguments of softmax attention.  Without relational heads, the package's decoders and vision models take
    none."""
    sa, _ = _split(settings.layer_heads(0))
    assert sa is not None
    takes = side != "decoder" and not isinstance(settings.inputs, config.Patches)
    kwargs = _attention(sa, _width(settings), takes and (side, "sa.kv") in biases, False)
    if kwargs and not takes:
        name, value = next(iter(kwargs.items()))
        raise ValueError(
            f"without relational heads the package's decoders and vision models have no {name}, but it is {value}"
        )
    return {"n_heads": sa.heads} | ({"attn_kwargs": kwargs} if kwargs else {})


def _dual_block(settings: config.TransformerConfig, biases: Biases, side: str) -> Arguments:
    def has(kind: str) -> tuple[bool, bool]:
        return (side, f"{kind}.kv") in biases, (side, f"{kind}.out") in biases

    sa, ra = _split(settings.layer_heads(0))
    found: Arguments = {"n_heads_sa": sa.heads if sa else 0, "n_heads_ra": ra.heads if ra else 0}
    if sa is not None:
        found["sa_kwargs"] = _attention(sa, _width(settings), *has("sa"))
    if ra is not None:
        found["ra_kwargs"] = _relational(ra, _width(settings), *has("ra"))
        found["ra_type"] = {config.Abstractor: "rca", config.Disentangled: "disrca"}.get(type(ra), next(iter(KINDS)))
        found["share_attn_params"] = ra.share
    for group in settings.layer_cross_heads(0):
        found["cross_kwargs"] = _attention(group, settings.dim // group.heads, *has("cross"))
    return found


def _attention(group: config.Mechanism, wide: int, kv: bool, out: bool) -> Arguments:
    """The arguments of a module, without those at their defaults."""
    found = {"n_kv_heads": (group.kv_heads, group.heads), "key_dim": (group.dim, wide)}
    found |= {"add_bias_kv": (kv, False), "add_bias_out": (out, False)}
    return {name: value for name, (value, default) in found.items() if value != default}


def _relational(group: config.SymbolHeads, wide: int, kv: bool, out: bool) -> Arguments:
    kv = kv and not isinstance(group, config.Disentangled)  # whose relation keys would have one, too
    found = _attention(group, wide, kv, out)
    if isinstance(group, config.Relational):
        found |= {"n_relations": group.relations, "rel_proj_dim": group.relation_dim}
        found |= {"symmetric_rels": group.symmetric}
    act = group.act if isinstance(group, config.Abstractor) else group.relation_act  # type: ignore[attr-defined]
    found["activation" if isinstance(group, config.Abstractor) else "rel_activation"] = _act(act, RELATION_ACTS)
    found["use_relative_positional_symbols"] = isinstance(group.symbols, config.RelativeSymbols)
    return found


def _act(act: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if act == ours:
            return theirs
    raise ValueError(f"the package has no activation {act!r} there (it has {', '.join(names.values())})")


def _feedforward(settings: config.TransformerConfig) -> Arguments:
    kind = settings.feedforward
    if isinstance(kind, config.Swiglu):
        return {"activation": "swiglu", "dff": kind.hidden, "bias": kind.bias}
    if isinstance(kind, config.Mlp):
        return {"activation": _act(kind.act, FEEDFORWARD_ACTS), "dff": kind.hidden, "bias": kind.bias}
    raise ValueError(f"feedforward must be Mlp or Swiglu but is {type(kind).__name__}")


# -------------------------------------------------------------------------------------------------------------- symbols
def _source(settings: config.TransformerConfig) -> config.SymbolSource:
    ra = _split(settings.layer_heads(0))[1]
    assert ra is not None
    return ra.symbols


def _retriever(source: config.SymbolSource, settings: config.TransformerConfig) -> Arguments:
    kwargs: Arguments
    if isinstance(source, config.PositionSymbols):
        kind, kwargs = RETRIEVERS[1], {"symbol_dim": settings.dim, "max_length": settings.max_length}
    elif isinstance(source, config.RelativeSymbols):
        kind, kwargs = RETRIEVERS[2], {"symbol_dim": settings.dim, "max_rel_pos": source.distance}
    else:
        related = isinstance(source, config.RelationalSymbols)
        kind, names = ("rel_sym_attn", NEIGHBOURS) if related else (RETRIEVERS[0], SYMBOLIC)
        kwargs = {"d_model": settings.dim, **{name: getattr(source, ours) for name, ours in names.items()}}
    return {"symbol_retrieval": kind, "symbol_retrieval_kwargs": kwargs}


# ----------------------------------------------------------------------------------------------------------- comparison
def plain(settings: config.TransformerConfig) -> config.TransformerConfig:
    """`settings` with all defaults written out, and without fields that do not belong to the format."""
    encoder = settings.encoder
    layers = [settings.layer_heads(i) for i in range(settings.layers)]
    cross = settings.layer_cross_heads(0)
    last = settings.norm_order == "pre" if settings.final_norm is None else settings.final_norm
    values = isinstance(settings.outputs, config.Values)
    return dataclasses.replace(
        settings,
        heads=tuple(_plain_heads(heads, settings) for heads in layers),
        cross_heads=_plain_heads(cross, settings) if cross else None,
        feedforward=_plain_feedforward(settings),
        final_norm=last,
        outputs=config.Logits(settings.outputs.size, bias=settings.outputs.bias) if values else settings.outputs,  # type: ignore[union-attr]
        encoder=plain(dataclasses.replace(encoder, outputs=config.Values(1)))
        if isinstance(encoder, config.TransformerConfig)
        else encoder,
        init="cs336",
        dropout_shared=False,
        residual_dropout=settings.dropout,
        checkpoint=False,
    )


def _plain_heads(heads: config.Heads, settings: config.TransformerConfig) -> config.Heads:
    total = sum(group.heads for group in heads)
    return tuple(_plain_group(group, settings, settings.dim // total) for group in heads)


def _plain_group(group: config.Mechanism, settings: config.TransformerConfig, wide: int) -> config.Mechanism:
    value_dim, kv_heads = group.value_dim or wide, group.kv_heads or group.heads
    group = dataclasses.replace(group, dim=group.dim or wide, value_dim=value_dim, kv_heads=kv_heads, impl="auto")
    if isinstance(group, config.SymbolHeads):
        group = dataclasses.replace(group, symbols=_plain_source(group.symbols, settings))
    if isinstance(group, config.Relational):
        relations = group.relations or group.heads
        width = group.relation_dim or max(1, group.heads * value_dim // relations)
        return dataclasses.replace(group, relations=relations, relation_dim=width, relation_init="balanced")
    if isinstance(group, config.Disentangled):
        return dataclasses.replace(group, relation_dim=group.relation_dim or value_dim)
    return group


def _plain_source(source: config.SymbolSource, settings: config.TransformerConfig) -> config.SymbolSource:
    dim = source.dim or settings.dim
    source = dataclasses.replace(source, dim=dim)
    if isinstance(source, config.SymbolicAttention):
        heads, tied = source.heads or math.gcd(4, settings.dim, dim), source.tied and not source.shared
        source = dataclasses.replace(source, heads=heads, tied=tied)
    if isinstance(source, config.RelationalSymbols):
        source = dataclasses.replace(source, causal=settings.causal if source.causal is None else source.causal)
    if isinstance(source, config.RelativeSymbols):
        source = dataclasses.replace(source, distance=source.distance or settings.max_length - 1)
    return source


def _plain_feedforward(settings: config.TransformerConfig) -> Any:
    kind = settings.feedforward
    if not isinstance(kind, config.Mlp | config.Swiglu | config.Experts):
        return kind
    hidden = swiglu_width(settings.dim) if isinstance(kind, config.Swiglu) else 4 * settings.dim
    return dataclasses.replace(kind, hidden=kind.hidden or hidden)


def difference(wanted: Any, came: Any, path: str = "") -> str | None:
    """The first difference of two `plain` settings, in words.

    Biases are not compared: those that only the package has are 0, and those that only ours has are checked by value.
    """
    if dataclasses.is_dataclass(wanted) and type(wanted) is type(came):
        names = [f.name for f in dataclasses.fields(wanted) if f.name != "bias"]
        pairs = [(f"{path}.{name}".lstrip("."), getattr(wanted, name), getattr(came, name)) for name in names]
    elif isinstance(wanted, tuple) and isinstance(came, tuple) and len(wanted) == len(came):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(wanted, came, strict=True))]
    else:
        return None if wanted == came else f"{path} must be {wanted} but is {came}"
    return next((found for p, w, c in pairs if (found := difference(w, c, p))), None)
