"""The language models of the package `dual-attention` from their constructors' arguments.

With `n_heads_sa` and `n_heads_ra` a model has dual attention; with `n_heads` it has none.
"""

from dataclasses import dataclass

from polyhead import config
from polyhead.compat.dual_attention.attention import (
    DUAL,
    FEEDFORWARD_ACTS,
    SENSORY,
    Arguments,
    PackageHeads,
    dual_groups,
    heads_of,
    nested,
    with_defaults,
)
from polyhead.spec.shapes import one_of

POSITIONS: dict[str, config.Position] = {"pos_emb": config.Learned(), "RoPE": config.Rotary()}
NORMS = {"layernorm": "layer", "rmsnorm": "rms"}
RETRIEVERS = ("symbolic_attention", "positional_symbols", "position_relative")
SIZES = ("vocab_size", "d_model", "n_layers", "max_block_size")
REQUIRED = (*SIZES, "dff", "activation", "dropout_rate", "norm_first")
OPTIONAL = {"norm_type": "layernorm", "bias": True, "pos_enc_type": "pos_emb"}
DUAL_REQUIRED = (*REQUIRED, "n_heads_sa", "n_heads_ra", "symbol_retrieval_kwargs")
DUAL_OPTIONAL = {**OPTIONAL, **DUAL, "symbol_retrieval": "symbolic_attention", "symbol_retriever_config": None}


@dataclass(frozen=True)
class Layout:
    """A model: our configuration, its groups of heads, and its source of symbols if it has relational heads.

    `unused`: prefixes of keys that no head reads.
    """

    settings: config.TransformerConfig
    groups: tuple[PackageHeads, ...]
    source: config.SymbolSource | None = None
    unused: tuple[str, ...] = ()


def layout_of(arguments: Arguments) -> Layout:
    """Return the model with these arguments.  Raises ValueError if ours has no equivalent."""
    if "vocab_size" not in arguments:
        raise ValueError("vocab_size missing: only language models of the package can be loaded")
    source: config.SymbolSource | None = None
    unused: tuple[str, ...] = ()
    if "n_heads_sa" in arguments or "n_heads_ra" in arguments:
        options = with_defaults(arguments, DUAL_REQUIRED, DUAL_OPTIONAL)
        options["bias"] = True  # the package ignores the argument
        if options["n_heads_ra"]:
            source = _source(options)
        else:
            unused = ("layers.symbol_retrievers.",)
        groups = dual_groups(options, "dual_attn.", source or config.SymbolicAttention(), causal=True)
    else:
        optional = {**OPTIONAL, "use_flash_attention": True, "block_kwargs": None}
        options = with_defaults(arguments, (*REQUIRED, "n_heads"), optional)
        block = nested(options, "block_kwargs", (), {"attn_kwargs": None})
        attention = nested(block, "attn_kwargs", (), SENSORY)
        attention["add_bias_out"] = options["bias"]
        groups = (heads_of("sa", options["n_heads"], attention, "self_attn."),)

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
    return Layout(settings, groups, source, unused)


def _source(options: Arguments) -> config.SymbolSource:
    """The package's symbol retriever, and whether its layers share it."""
    kind = one_of("arguments", "symbol_retrieval", options["symbol_retrieval"], RETRIEVERS)
    defaults = {"shared_symbol_retriever": True, "weight_tie_symbol_library": False}
    sharing = nested(options, "symbol_retriever_config", (), defaults)
    shared = sharing["shared_symbol_retriever"]
    if not shared and sharing["weight_tie_symbol_library"]:
        raise ValueError("symbol_retriever_config: weight_tie_symbol_library must be false, or the retriever shared")
    name = "symbol_retrieval_kwargs"
    if kind == "positional_symbols":
        retrieval = nested(options, name, ("symbol_dim", "max_length"), {"sinusoidal": False})
        return config.PositionSymbols(shared=shared)  # one row for each of the model's positions
    if kind == "position_relative":
        retrieval = nested(options, name, ("symbol_dim", "max_rel_pos"), {})
        return config.RelativeSymbols(distance=retrieval["max_rel_pos"], shared=shared)
    optional = {"dropout": 0.0, "scale": None, "trainable_symbols": True}
    retrieval = nested(options, name, ("d_model", "n_heads", "n_symbols"), optional)
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
