"""Translation of the arguments of the package `dual-attention`: of its models, blocks and attention modules.

Names and defaults are those of its constructors; arguments that they ignore are ignored here.  An argument that is
unknown, missing, of a wrong type or without an equivalent raises ValueError, which names it.  Start with `load.py`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyhead import config
from polyhead.spec.shapes import one_of

Arguments = Mapping[str, Any]

COUNTS = (
    *("vocab_size", "d_model", "n_layers", "n_layers_enc", "n_layers_dec", "n_heads", "n_heads_cross", "num_classes"),
    *("max_block_size", "in_block_size", "out_block_size", "out_dim", "dim", "dff", "key_dim", "n_kv_heads"),
    *("total_n_heads", "n_relations", "rel_proj_dim", "n_symbols", "max_length", "max_rel_pos", "symbol_dim"),
    *("rel_n_heads", "symbolic_attn_n_heads", "nbhd_delta"),
)
SWITCHES = (
    *("norm_first", "bias", "causal", "share_attn_params", "add_bias_kv", "add_bias_out", "symmetric_rels"),
    *("use_relative_positional_symbols", "trainable_symbols", "causal_nbhd", "include_self", "normalize_rels"),
    *("shared_symbol_retriever", "weight_tie_symbol_library", "tie_weights", "use_flash_attention"),
)
TABLES = (
    *("sa_kwargs", "ra_kwargs", "cross_kwargs", "attn_kwargs", "block_kwargs", "encoder_kwargs", "decoder_kwargs"),
    *("symbol_retrieval_kwargs", "symbol_retriever_config", "input_spec", "output_spec"),
)
RATES = ("dropout_rate", "dropout", "scale", "rel_scale", "symbolic_attn_scale")

FEEDFORWARD_ACTS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
RELATION_ACTS = {**FEEDFORWARD_ACTS, "sigmoid": "sigmoid", "tanh": "tanh", "softmax": "softmax"}
"""Activations by the package's names; its gelu is the tanh form."""
NORMS = {"layernorm": "layer", "rmsnorm": "rms"}
KINDS = {"relational_attention": "ra", "rca": "rca", "disrca": "disrca"}
RETRIEVERS = ("symbolic_attention", "positional_symbols", "position_relative")

SYMBOLIC = {"n_symbols": "count", "n_heads": "heads", "trainable_symbols": "trainable"}
NEIGHBOURS = {
    "n_symbols": "count",
    "symbolic_attn_n_heads": "heads",
    "rel_n_heads": "relations",
    "nbhd_delta": "neighbours",
    "causal_nbhd": "causal",
    "include_self": "include_self",
    "normalize_rels": "normalise",
}
"""Arguments of its symbolic attention and of its relational symbols -> the fields of ours."""

BLOCK = ("dff", "activation", "dropout_rate", "norm_first")
PLAIN_BLOCK, DUAL_BLOCK = ("n_heads", *BLOCK), ("n_heads_sa", "n_heads_ra", *BLOCK)
BLOCK_OPTIONS = {"norm_type": "layernorm", "bias": True, "causal": False}
DUAL = {"sa_kwargs": None, "ra_kwargs": None, "ra_type": "relational_attention", "share_attn_params": False}
DUAL_OPTIONS = {**BLOCK_OPTIONS, **DUAL}
SENSORY = {"key_dim": None, "n_kv_heads": None, "add_bias_kv": False}
_CROSS = {"n_kv_heads": None, "add_bias_kv": False, "add_bias_out": False, "use_relative_positional_symbols": False}
_RELATIONS = {"n_relations": None, "key_dim": None, "rel_proj_dim": None, "symmetric_rels": False}
RELATIONAL = {
    "ra": {**_CROSS, **_RELATIONS, "rel_activation": "identity"},
    "rca": {**_CROSS, "activation": "softmax"},
    "disrca": {**_CROSS, "rel_activation": "identity"},
}
"""The optional arguments of its attention modules, with their defaults."""


@dataclass(frozen=True)
class PackageHeads:
    """Heads of one kind: the package's module, whose keys start with `prefix`, and ours.

    `kind`: "sa" (its Attention), or a value of KINDS; `factor`: the factor of its queries in our model.
    """

    prefix: str
    kind: str
    mechanism: config.Mechanism
    bias_kv: bool
    bias_out: bool
    factor: float = 1.0


@dataclass(frozen=True)
class PackageBlock:
    """Blocks of one kind: their self-attention, their cross-attention, and their fields of a TransformerConfig."""

    groups: tuple[PackageHeads, ...]
    cross: tuple[PackageHeads, ...]
    fields: Arguments

    @property
    def heads(self) -> list[config.Mechanism]:
        return [group.mechanism for group in self.groups]


def by_name(given: Any) -> Arguments:
    """The arguments `given`.  Raises ValueError if they are no mapping."""
    if not isinstance(given, Mapping):
        raise ValueError(f"arguments by name were wanted but {given!r} came")
    return given


def options(given: Any, required: Iterable[str], optional: Arguments) -> dict[str, Any]:
    """The arguments `given`, checked, with the defaults filled in."""
    required = tuple(required)
    for name, value in by_name(given).items():
        _check(one_of("arguments", "name", name, (*required, *optional)), value, name in required)
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{', '.join(missing)} missing")
    return {**optional, **given}


def part(arguments: Arguments, name: str, required: Iterable[str], optional: Arguments) -> dict[str, Any]:
    """The arguments under one name of `arguments`, which may be None."""
    try:
        return options(arguments[name] or {}, required, optional)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check(name: str, value: Any, required: bool) -> None:
    if value is None and (not required or name == "dff"):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    for names, right, wanted in (
        (COUNTS, whole and value >= 1, "be an integer of at least 1"),
        (("n_heads_sa", "n_heads_ra"), whole and value >= 0, "be an integer of at least 0"),
        (SWITCHES, isinstance(value, bool), "be true or false"),
        (TABLES, isinstance(value, Mapping), "hold arguments by name"),
        (RATES, number, "be a number"),
    ):
        if name in names and not right:
            raise ValueError(f"{name} must {wanted} but is {value!r}")


# ------------------------------------------------------------------------------------------------------------ attention
@dataclass(frozen=True)
class Width:
    """The width of heads: `total` heads fill the model width, `listed` of them are in our layer."""

    model: int
    total: int
    listed: int

    def __post_init__(self) -> None:
        if self.total < 1 or self.model % self.total:
            raise ValueError(f"d_model must be a multiple of the heads, {self.total}, but is {self.model}")

    @property
    def head(self) -> int:
        return self.model // self.total

    def sizes(self, heads: int, its: Arguments) -> tuple[int | None, int | None, int | None]:
        """`dim`, `value_dim` and `kv_heads` of a mechanism; None where the default is right."""
        key, kv, own = its.get("key_dim") or self.head, its["n_kv_heads"], self.total == self.listed
        return None if own and key == self.head else key, None if own else self.head, None if kv == heads else kv

    def factor(self, its: Arguments) -> float:
        """The factor of queries: the package divides scores by the root of the head width, for every width of keys."""
        return math.sqrt((its.get("key_dim") or self.head) / self.head)


def sensory(
    given: Arguments, name: str, heads: int, width: Width, prefix: str, bias_out: bool | None = None
) -> PackageHeads:
    """Its Attention; `bias_out` None: from its own arguments."""
    its = part(given, name, (), SENSORY if bias_out is not None else {**SENSORY, "add_bias_out": False})
    out = its["add_bias_out"] if bias_out is None else bias_out
    dim, value_dim, kv_heads = width.sizes(heads, its)
    mechanism = config.Softmax(heads, dim=dim, value_dim=value_dim, kv_heads=kv_heads)
    return PackageHeads(prefix, "sa", mechanism, its["add_bias_kv"], out, width.factor(its))


def relational(
    given: Arguments,
    kind: str,
    heads: int,
    width: Width,
    prefix: str,
    *,
    source: config.SymbolSource,
    causal: bool,
    share: bool = False,
) -> PackageHeads:
    """Its RelationalAttention ("ra"), RelationalCrossAttention ("rca") or disentangled one ("disrca")."""
    its = part(given, "ra_kwargs", (), RELATIONAL[kind])
    relative = isinstance(source, config.RelativeSymbols)
    if its["use_relative_positional_symbols"] != relative:
        wanted = "must be true with" if relative else "belongs to"
        raise ValueError(f"ra_kwargs: use_relative_positional_symbols {wanted} position-relative symbols")
    act_name = "activation" if kind == "rca" else "rel_activation"
    act = RELATION_ACTS[one_of("ra_kwargs", act_name, its[act_name], RELATION_ACTS)]
    if act == "softmax" and causal and kind != "rca":
        raise ValueError("ra_kwargs: the package's softmax of relations sees later tokens although causal, ours cannot")
    dim, value_dim, kv_heads = width.sizes(heads, its)
    mechanism: config.Mechanism
    if kind == "rca":
        if share:
            raise ValueError("share_attn_params: the package has it for relational_attention and disrca only")
        mechanism = config.Abstractor(heads, dim=dim, value_dim=value_dim, kv_heads=kv_heads, symbols=source, act=act)
    elif kind == "disrca":
        if its["add_bias_kv"]:
            raise ValueError("ra_kwargs: add_bias_kv of disrca gives relation keys a bias, ours have none")
        if its["n_kv_heads"] not in (None, 1, heads):
            raise ValueError(f"ra_kwargs: n_kv_heads of disrca must be 1 or {heads} but is {its['n_kv_heads']}")
        mechanism = config.Disentangled(
            heads, dim=dim, value_dim=value_dim, kv_heads=kv_heads, symbols=source, share=share, relation_act=act
        )
    else:
        wide, relations = heads * width.head, its["n_relations"] or heads
        p = its["rel_proj_dim"] or wide // relations
        if p * relations != wide:
            wanted = f"n_relations x rel_proj_dim must be {wide}, the heads' width"
            raise ValueError(f"ra_kwargs: {wanted}, not {relations} x {p}")
        mechanism = config.Relational(
            heads, dim=dim, value_dim=value_dim, kv_heads=kv_heads, symbols=source, share=share, relation_act=act,
            relations=None if relations == heads else relations, symmetric=its["symmetric_rels"],
        )  # fmt: skip
    return PackageHeads(prefix, kind, mechanism, its["add_bias_kv"], its["add_bias_out"], width.factor(its))


def dual_groups(its: Arguments, d_model: int, prefix: str, source: config.SymbolSource) -> tuple[PackageHeads, ...]:
    """The groups of a DualAttention: sensory heads first."""
    sa, ra, share = its["n_heads_sa"], its["n_heads_ra"], its["share_attn_params"]
    kind = KINDS[one_of("arguments", "ra_type", its["ra_type"], KINDS)]
    width = Width(d_model, sa + ra, sa + ra)
    if share and sa != ra:
        raise ValueError(f"share_attn_params needs n_heads_sa = n_heads_ra but they are {sa} and {ra}")
    groups = [sensory(its, "sa_kwargs", sa, width, f"{prefix}self_attention.")] if sa else []
    if ra:
        where, causal = f"{prefix}relational_attention.", its["causal"]
        groups.append(relational(its, kind, ra, width, where, source=source, causal=causal, share=share))
    if share and groups[0].factor != groups[1].factor:
        raise ValueError("share_attn_params needs one key_dim in sa_kwargs and ra_kwargs")
    return tuple(groups)


# --------------------------------------------------------------------------------------------------------------- blocks
def block(
    given: Any, d_model: int, *, dual: bool, decoder: bool = False, source: config.SymbolSource | None = None
) -> PackageBlock:
    """A block from its arguments: with or without dual attention, of an encoder or a decoder."""
    needed = (*(DUAL_BLOCK if dual else PLAIN_BLOCK), *(("n_heads_cross",) if decoder else ()))
    bias_out = None
    if dual:
        its = options(given, needed, DUAL_OPTIONS | ({"cross_kwargs": None, "causal": True} if decoder else {}))
        groups = dual_groups(its, d_model, "dual_attn.", config.SymbolicAttention() if source is None else source)
        heads = its.get("n_heads_cross", 0)
    else:
        its = options(given, needed, BLOCK_OPTIONS | ({} if decoder else {"attn_kwargs": None}))
        its = {"attn_kwargs": None, "cross_kwargs": None, **its}
        heads, bias_out = its["n_heads"], its["bias"]  # its decoder ignores n_heads_cross and uses as many
        groups = (sensory(its, "attn_kwargs", heads, Width(d_model, heads, heads), "self_attn.", bias_out),)
    cross: tuple[PackageHeads, ...] = ()
    if decoder:
        cross = (sensory(its, "cross_kwargs", heads, Width(d_model, heads, heads), "cross_attn.", bias_out),)
    fields = {
        "dim": d_model,
        "heads": [group.mechanism for group in groups],
        "feedforward": feedforward(its, d_model),
        "causal": its["causal"],
        "norm": NORMS[one_of("arguments", "norm_type", its["norm_type"], NORMS)],
        "norm_eps": 1e-5,
        "norm_order": "pre" if its["norm_first"] else "post",
        "bias": any(group.bias_kv or group.bias_out for group in (*groups, *cross)),
        "dropout": float(its["dropout_rate"]),
        "residual_dropout": float(its["dropout_rate"]),
    }
    if decoder:
        fields["cross_heads"] = [group.mechanism for group in cross]
    return PackageBlock(groups, cross, fields)


def feedforward(its: Arguments, d_model: int) -> config.FeedForward:
    """Its FeedForwardBlock."""
    name, hidden, bias = its["activation"], its["dff"], its["bias"]
    one_of("feed-forward layers", "activation", name, (*FEEDFORWARD_ACTS, "swiglu"))
    if name == "swiglu":
        return config.Swiglu(int(2 / 3 * 4 * d_model) if hidden is None else hidden, bias=bias)
    return config.Mlp(hidden, act=FEEDFORWARD_ACTS[name], bias=bias)


# -------------------------------------------------------------------------------------------------------------- symbols
@dataclass(frozen=True)
class SymbolRetriever:
    """A source of symbols; `factors`: factors of its queries and of its relations' queries in our model; `length`: its
    number of positions."""

    source: config.SymbolSource
    factors: tuple[float, float] = (1.0, 1.0)
    length: int | None = None


def retriever(
    its: Arguments, d_model: int, *, relational: bool = True, layers: Arguments | None = None
) -> SymbolRetriever:
    """Its symbol retriever; `relational`: whether a relational one is allowed; `layers`: how layers share it."""
    kinds = (*RETRIEVERS, "rel_sym_attn") if relational else RETRIEVERS
    kind = one_of("arguments", "symbol_retrieval", its["symbol_retrieval"], kinds)
    shared = layers is None or layers["shared_symbol_retriever"]
    tied = not shared and layers is not None and layers["weight_tie_symbol_library"]
    if kind in ("positional_symbols", "position_relative"):
        return _by_position(its, kind, d_model, shared=shared, tied=tied)
    wanted: Arguments
    if kind == "symbolic_attention":
        wanted = {"dropout": 0.0, "scale": None, "trainable_symbols": True}
        own = part(its, "symbol_retrieval_kwargs", ("d_model", "n_heads", "n_symbols"), wanted)
    else:
        wanted = {"causal_nbhd": True, "include_self": False, "normalize_rels": True, "dropout": 0.0}
        wanted |= {"rel_scale": None, "symbolic_attn_scale": None}
        needed = ("d_model", "rel_n_heads", "symbolic_attn_n_heads", "n_symbols", "nbhd_delta")
        own = part(its, "symbol_retrieval_kwargs", needed, wanted)
    _fits(own["d_model"], "d_model", d_model)
    if own["dropout"]:
        wanted_because = "dropout must be 0 (the package applies it in evaluation, too)"
        raise ValueError(f"symbol_retrieval_kwargs: {wanted_because} but is {own['dropout']}")
    names = SYMBOLIC if kind == "symbolic_attention" else NEIGHBOURS
    fields = {ours: own[name] for name, ours in names.items()}
    if kind == "symbolic_attention":
        source = config.SymbolicAttention(**fields, shared=shared, tied=tied)
        return SymbolRetriever(source, (_factor(own["scale"], d_model, own["n_heads"]), 1.0))
    related = _factor(own["rel_scale"], d_model, own["rel_n_heads"]) if own["normalize_rels"] else 1.0
    symbolic = _factor(own["symbolic_attn_scale"], d_model, own["symbolic_attn_n_heads"])
    return SymbolRetriever(config.RelationalSymbols(**fields), (symbolic, related))


def _by_position(its: Arguments, kind: str, d_model: int, *, shared: bool, tied: bool) -> SymbolRetriever:
    if kind == "positional_symbols":  # sinusoidal is not read there; tied, one table is all there is
        own = part(its, "symbol_retrieval_kwargs", ("symbol_dim", "max_length"), {"sinusoidal": False})
        _fits(own["symbol_dim"], "symbol_dim", d_model)
        return SymbolRetriever(config.PositionSymbols(shared=shared or tied), length=own["max_length"])
    if tied:
        raise ValueError("symbol_retriever_config: the package ties no position-relative symbols")
    own = part(its, "symbol_retrieval_kwargs", ("symbol_dim", "max_rel_pos"), {})
    _fits(own["symbol_dim"], "symbol_dim", d_model)
    return SymbolRetriever(config.RelativeSymbols(distance=own["max_rel_pos"], shared=shared))


def _fits(came: int, name: str, d_model: int) -> None:
    if came != d_model:
        raise ValueError(f"symbol_retrieval_kwargs: {name} must be {d_model}, the model's width, but is {came}")


def _factor(scale: float | None, width: int, heads: int) -> float:
    if width % heads:
        raise ValueError(f"symbol_retrieval_kwargs: its heads must divide {width} but are {heads}")
    return 1.0 if scale is None else scale * math.sqrt(width / heads)
