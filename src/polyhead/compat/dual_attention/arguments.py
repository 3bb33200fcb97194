"""The language models of the package `dual-attention` from their constructors' arguments, by its names and defaults.

With `n_heads_sa` and `n_heads_ra` a model has dual attention; with `n_heads` it has none.  An argument that is unknown
or without an equivalent raises ValueError, because the loaded model would compute something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyhead import config
from polyhead.spec.shapes import one_of

Arguments = Mapping[str, Any]

# Activations by the package's names; its gelu is the tanh form.
FEEDFORWARD_ACTS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
RELATION_ACTS = {**FEEDFORWARD_ACTS, "sigmoid": "sigmoid", "tanh": "tanh", "softmax": "softmax"}
POSITIONS: dict[str, config.Position] = {"pos_emb": config.Learned(), "RoPE": config.Rotary()}
NORMS = {"layernorm": "layer", "rmsnorm": "rms"}

REQUIRED = ("vocab_size", "d_model", "n_layers", "max_block_size", "dff", "activation", "dropout_rate", "norm_first")
DEFAULTS = {"norm_type": "layernorm", "bias": True, "pos_enc_type": "pos_emb"}
PLAIN = {**DEFAULTS, "use_flash_attention": True, "block_kwargs": None}
DUAL = {**DEFAULTS, "sa_kwargs": None, "ra_kwargs": None, "ra_type": "relational_attention", "share_attn_params": False}
DUAL |= {"symbol_retrieval": "symbolic_attention", "symbol_retriever_config": None}
"""The optional arguments of a model without and with relational heads."""

SENSORY = {"n_kv_heads": None, "add_bias_kv": False, "add_bias_out": False, "key_dim": None}
CROSS = {**SENSORY, "use_relative_positional_symbols": False}
RELATIONS = {"n_relations": None, "rel_proj_dim": None, "symmetric_rels": False}  # shapes show rel_proj_dim, too
HEADS: dict[str, dict[str, Any]] = {
    "relational_attention": {**CROSS, **RELATIONS, "rel_activation": "identity"},
    "rca": {**CROSS, "activation": "softmax"},
    "disrca": {**CROSS, "rel_activation": "identity"},
}
"""The optional arguments of each kind of relational heads, the package's `ra_type`."""


@dataclass(frozen=True)
class PackageHeads:
    """Heads of one kind, and ours.  The keys of the package's module start with `prefix`."""

    prefix: str
    kind: str
    mechanism: config.Mechanism
    has_bias_kv: bool
    has_bias_out: bool


@dataclass(frozen=True)
class Layout:
    """A model: our configuration, its groups of heads, and its source of symbols if it has relational heads."""

    settings: config.TransformerConfig
    groups: tuple[PackageHeads, ...]
    source: config.SymbolSource | None


def fill_in(name: str, arguments: Any, defaults: Arguments, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the arguments with the defaults filled in.  Raises ValueError for unknown and missing names."""
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name} must be arguments by name, got {arguments!r}")
    for argument in arguments:
        one_of(name, "argument", argument, (*required, *defaults))
    missing = [argument for argument in required if argument not in arguments]
    if missing:
        raise ValueError(f"{name}: {', '.join(missing)} missing")
    return {**defaults, **arguments}


def layout_of(arguments: Arguments) -> Layout:
    """Return the model with these arguments."""
    source = None
    if "n_heads_ra" in arguments:
        required = (*REQUIRED, "n_heads_sa", "n_heads_ra", "symbol_retrieval_kwargs")
        options = fill_in("arguments", arguments, DUAL, required)
        options["bias"] = True  # the package ignores the argument
        if options["n_heads_ra"]:
            source = symbol_source(options)
        groups = dual_groups(options, source)
    else:
        options = fill_in("arguments", arguments, PLAIN, (*REQUIRED, "n_heads"))
        block = fill_in("block_kwargs", options["block_kwargs"] or {}, {"attn_kwargs": None})
        attention = fill_in("attn_kwargs", block["attn_kwargs"] or {}, SENSORY)
        attention["add_bias_out"] = options["bias"]
        groups = (package_heads("softmax", options["n_heads"], attention, "self_attn."),)

    act = one_of("feed-forward layers", "activation", options["activation"], (*FEEDFORWARD_ACTS, "swiglu"))
    hidden = options["dff"]
    feedforward: config.FeedForward
    if act == "swiglu":
        if hidden is None:
            hidden = int(2 / 3 * 4 * options["d_model"])
        feedforward = config.Swiglu(hidden, bias=options["bias"])
    else:
        feedforward = config.Mlp(hidden, act=FEEDFORWARD_ACTS[act], bias=options["bias"])
    settings = config.TransformerConfig(
        inputs=config.Tokens(options["vocab_size"]),
        outputs=config.Logits(options["vocab_size"], tied=True),
        layers=options["n_layers"],
        positions=POSITIONS[one_of("arguments", "pos_enc_type", options["pos_enc_type"], POSITIONS)],
        max_length=options["max_block_size"],
        final_norm=True,
        dim=options["d_model"],
        heads=[group.mechanism for group in groups],
        feedforward=feedforward,
        causal=True,
        norm=NORMS[one_of("arguments", "norm_type", options["norm_type"], NORMS)],
        norm_eps=1e-5,
        norm_order="pre" if options["norm_first"] else "post",
        bias=any(group.has_bias_kv or group.has_bias_out for group in groups),
        dropout=float(options["dropout_rate"]),
        residual_dropout=float(options["dropout_rate"]),
    )
    return Layout(settings, groups, source)


def dual_groups(options: Arguments, source: config.SymbolSource | None) -> tuple[PackageHeads, ...]:
    """Return the groups of a DualAttention, sensory heads first."""
    kind = one_of("arguments", "ra_type", options["ra_type"], HEADS)
    groups = []
    if options["n_heads_sa"]:
        sensory = fill_in("sa_kwargs", options["sa_kwargs"] or {}, SENSORY)
        groups.append(package_heads("softmax", options["n_heads_sa"], sensory, "dual_attn.self_attention."))
    if source is not None:
        relational = fill_in("ra_kwargs", options["ra_kwargs"] or {}, HEADS[kind])
        relational |= {"symbols": source, "share": options["share_attn_params"]}
        groups.append(package_heads(kind, options["n_heads_ra"], relational, "dual_attn.relational_attention."))
    return tuple(groups)


def package_heads(kind: str, num_heads: int, options: Arguments, prefix: str) -> PackageHeads:
    """Return heads of a kind, from the arguments of their module with all defaults."""
    if options["key_dim"] is not None:
        raise ValueError("key_dim must be None, for which keys have the width of heads")
    fields: dict[str, Any] = {"kv_heads": options["n_kv_heads"]}
    if fields["kv_heads"] == num_heads:
        fields["kv_heads"] = None
    mechanism: type[config.Mechanism] = config.Softmax
    if kind != "softmax":
        fields["symbols"] = options["symbols"]
        act_name = "activation" if kind == "rca" else "rel_activation"
        act = RELATION_ACTS[one_of("ra_kwargs", act_name, options[act_name], RELATION_ACTS)]
        if act == "softmax" and kind != "rca":
            raise ValueError(
                "ra_kwargs: the package's softmax of relations sees later tokens although causal, ours cannot"
            )
    if kind == "rca":
        mechanism = config.Abstractor
        fields["act"] = act
    elif kind != "softmax":
        mechanism = config.Disentangled
        fields |= {"share": options["share"], "relation_act": act}
    if kind == "relational_attention":
        mechanism = config.Relational
        fields["symmetric"] = options["symmetric_rels"]
        if options["n_relations"] != num_heads:
            fields["relations"] = options["n_relations"]
    return PackageHeads(prefix, kind, mechanism(num_heads, **fields), options["add_bias_kv"], options["add_bias_out"])


def symbol_source(options: Arguments) -> config.SymbolSource:
    """The package's symbol retriever, and whether its layers share it."""
    defaults = {"shared_symbol_retriever": True, "weight_tie_symbol_library": False}
    # A shared retriever is one module with the names of all layers.
    sharing = fill_in("symbol_retriever_config", options["symbol_retriever_config"] or {}, defaults)
    shared = sharing["shared_symbol_retriever"]
    if not shared and sharing["weight_tie_symbol_library"]:
        raise ValueError("symbol_retriever_config: weight_tie_symbol_library must be false, or the retriever shared")
    kinds = ("symbolic_attention", "positional_symbols", "position_relative")
    kind = one_of("arguments", "symbol_retrieval", options["symbol_retrieval"], kinds)
    name, arguments = "symbol_retrieval_kwargs", options["symbol_retrieval_kwargs"]
    if kind == "positional_symbols":
        fill_in(name, arguments, {"sinusoidal": False}, ("symbol_dim", "max_length"))
        return config.PositionSymbols(shared=shared)  # one row for each of the model's positions
    if kind == "position_relative":
        retrieval = fill_in(name, arguments, {}, ("symbol_dim", "max_rel_pos"))
        return config.RelativeSymbols(distance=retrieval["max_rel_pos"], shared=shared)
    library = {"dropout": 0.0, "scale": None, "trainable_symbols": True}
    retrieval = fill_in(name, arguments, library, ("d_model", "n_heads", "n_symbols"))
    if retrieval["scale"] is not None:
        raise ValueError(f"{name}: scale must be None, for which the width of heads gives it")
    if retrieval["dropout"]:
        raise ValueError(f"{name}: dropout must be 0: the package applies it in evaluation, too")
    return config.SymbolicAttention(
        count=retrieval["n_symbols"],
        heads=retrieval["n_heads"],
        trainable=retrieval["trainable_symbols"],
        shared=shared,
    )
