"""The language models of the package `dual-attention` from their constructors' arguments, by its names and defaults.

With `n_heads_sa` and `n_heads_ra` a model has dual attention; with `n_heads` it has none.  An argument that is unknown
or without an equivalent raises ValueError, because the loaded model would compute something else.
"""

from collections.abc import Mapping
from typing import Any

from polyhead import config
from polyhead.spec.shapes import one_of

Arguments = Mapping[str, Any]

# Activations by the package's names; its gelu is the tanh form.
FEEDFORWARD_ACTS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
# Its softmax of relations sees later tokens although causal: ours cannot.
RELATION_ACTS = {**FEEDFORWARD_ACTS, "sigmoid": "sigmoid", "tanh": "tanh"}
POSITIONS: dict[str, config.Position] = {"pos_emb": config.Learned(), "RoPE": config.Rotary()}
NORMS = {"layernorm": "layer", "rmsnorm": "rms"}

REQUIRED = ("vocab_size", "d_model", "n_layers", "max_block_size", "dff", "activation", "dropout_rate", "norm_first")
DEFAULTS = {"norm_type": "layernorm", "bias": True, "pos_enc_type": "pos_emb"}
# Arguments that must have these values.
FIXED_PLAIN = {"block_kwargs": None}
FIXED_DUAL = {"ra_type": "relational_attention", "share_attn_params": False}
FIXED_HEADS = {"add_bias_kv": False, "add_bias_out": False, "key_dim": None}  # None: keys as wide as heads
FIXED_LIBRARY = {"scale": None, "dropout": 0.0}  # the width of heads gives the scale; dropout would act in evaluation

DUAL = {**DEFAULTS, "sa_kwargs": None, "ra_kwargs": None, "symbol_retrieval": "symbolic_attention"}
DUAL |= {"symbol_retriever_config": None}
RELATIONAL = {"symmetric_rels": False, "rel_activation": "identity", "use_relative_positional_symbols": False}
RELATIONAL |= dict.fromkeys(("n_kv_heads", "n_relations", "rel_proj_dim"))  # shapes show rel_proj_dim, too


def fill_in(
    name: str, arguments: Any, defaults: Arguments, required: tuple[str, ...] = (), fixed: Arguments | None = None
) -> dict[str, Any]:
    """Return the arguments with the defaults filled in.

    Raises:
        ValueError: For unknown and missing names, and for other values than the `fixed` ones.
    """
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name} must be arguments by name, got {arguments!r}")
    fixed = fixed or {}
    for argument, value in arguments.items():
        one_of(name, "argument", argument, (*required, *defaults, *fixed))
        if argument in fixed and value != fixed[argument]:
            raise ValueError(f"{name}: {argument} must be {fixed[argument]!r} but is {value!r}")
    missing = [argument for argument in required if argument not in arguments]
    if missing:
        raise ValueError(f"{name}: {', '.join(missing)} missing")
    return {**defaults, **fixed, **arguments}


def settings_of(arguments: Arguments) -> config.TransformerConfig:
    """Return our configuration of the model with these arguments."""
    has_bias = False
    if "n_heads_ra" in arguments:
        required = (*REQUIRED, "n_heads_sa", "n_heads_ra", "symbol_retrieval_kwargs")
        options = fill_in("arguments", arguments, DUAL, required, FIXED_DUAL)
        options["bias"] = True  # the package ignores the argument
        heads = dual_heads(options)
    else:
        defaults = {**DEFAULTS, "use_flash_attention": True}
        options = fill_in("arguments", arguments, defaults, (*REQUIRED, "n_heads"), FIXED_PLAIN)
        heads = [config.Softmax(options["n_heads"])]
        has_bias = options["bias"]

    act = one_of("feed-forward layers", "activation", options["activation"], (*FEEDFORWARD_ACTS, "swiglu"))
    hidden = options["dff"]
    feedforward: config.FeedForward
    if act == "swiglu":
        if hidden is None:
            hidden = int(2 / 3 * 4 * options["d_model"])
        feedforward = config.Swiglu(hidden, bias=options["bias"])
    else:
        feedforward = config.Mlp(hidden, act=FEEDFORWARD_ACTS[act], bias=options["bias"])
    return config.TransformerConfig(
        inputs=config.Tokens(options["vocab_size"]),
        outputs=config.Logits(options["vocab_size"], tied=True),
        layers=options["n_layers"],
        positions=POSITIONS[one_of("arguments", "pos_enc_type", options["pos_enc_type"], POSITIONS)],
        max_length=options["max_block_size"],
        final_norm=True,
        dim=options["d_model"],
        heads=heads,
        feedforward=feedforward,
        causal=True,
        norm=NORMS[one_of("arguments", "norm_type", options["norm_type"], NORMS)],
        norm_eps=1e-5,
        norm_order="pre" if options["norm_first"] else "post",
        bias=has_bias,
        dropout=float(options["dropout_rate"]),
        residual_dropout=float(options["dropout_rate"]),
    )


def dual_heads(options: Arguments) -> list[config.Mechanism]:
    """Return the groups of a DualAttention, softmax heads first."""
    heads: list[config.Mechanism] = []
    if options["n_heads_sa"]:
        sensory = fill_in("sa_kwargs", options["sa_kwargs"] or {}, {"n_kv_heads": None}, fixed=FIXED_HEADS)
        heads.append(config.Softmax(options["n_heads_sa"], kv_heads=sensory["n_kv_heads"]))
    if options["n_heads_ra"]:
        count = options["n_heads_ra"]
        relational = fill_in("ra_kwargs", options["ra_kwargs"] or {}, RELATIONAL, fixed=FIXED_HEADS)
        is_relative = options["symbol_retrieval"] == "position_relative"
        if relational["use_relative_positional_symbols"] != is_relative:
            raise ValueError(f"ra_kwargs: use_relative_positional_symbols must be {is_relative} with these symbols")
        num_relations = relational["n_relations"]
        act = one_of("ra_kwargs", "rel_activation", relational["rel_activation"], RELATION_ACTS)
        group = config.Relational(
            count,
            kv_heads=relational["n_kv_heads"],
            symbols=symbol_source(options),
            relation_act=RELATION_ACTS[act],
            symmetric=relational["symmetric_rels"],
            relations=None if num_relations == count else num_relations,
        )
        heads.append(group)
    return heads


def symbol_source(options: Arguments) -> config.SymbolSource:
    """The package's symbol retriever, and whether its layers share it."""
    # A shared retriever is one module with the names of all layers.
    defaults, fixed = {"shared_symbol_retriever": True}, {"weight_tie_symbol_library": False}
    sharing = fill_in("symbol_retriever_config", options["symbol_retriever_config"] or {}, defaults, fixed=fixed)
    shared = sharing["shared_symbol_retriever"]
    kinds = ("symbolic_attention", "positional_symbols", "position_relative")
    kind = one_of("arguments", "symbol_retrieval", options["symbol_retrieval"], kinds)
    name, arguments = "symbol_retrieval_kwargs", options["symbol_retrieval_kwargs"]
    if kind == "positional_symbols":
        fill_in(name, arguments, {}, ("symbol_dim", "max_length"), {"sinusoidal": False})
        return config.PositionSymbols(shared=shared)  # one row for each of the model's positions
    if kind == "position_relative":
        retrieval = fill_in(name, arguments, {}, ("symbol_dim", "max_rel_pos"))
        return config.RelativeSymbols(distance=retrieval["max_rel_pos"], shared=shared)
    required = ("d_model", "n_heads", "n_symbols")
    retrieval = fill_in(name, arguments, {"trainable_symbols": True}, required, FIXED_LIBRARY)
    return config.SymbolicAttention(
        count=retrieval["n_symbols"],
        heads=retrieval["n_heads"],
        trainable=retrieval["trainable_symbols"],
        shared=shared,
    )
