"""The models of the package `dual-attention` from their constructors' arguments: language, vision, sequence to
sequence.

Each has a variant without relational heads, with `n_heads` in place of `n_heads_sa` and `n_heads_ra`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyhead import config
from polyhead.compat.dual_attention.arguments import (
    BLOCK_OPTIONS,
    DUAL_BLOCK,
    DUAL_OPTIONS,
    PLAIN_BLOCK,
    PackageBlock,
    SymbolRetriever,
    block,
    options,
    part,
    retriever,
)
from polyhead.spec.shapes import one_of

POSITIONS: dict[str, config.Position] = {"pos_emb": config.Learned(), "RoPE": config.Rotary()}
SYMBOLS = ("symbol_retrieval_kwargs",)
LANGUAGE = ("vocab_size", "d_model", "n_layers", "max_block_size")
VISION = ("image_shape", "patch_size", "num_classes", "d_model", "n_layers")
SEQUENCE = (
    *("input_spec", "output_spec", "d_model", "out_dim", "n_layers_enc", "n_layers_dec", "encoder_kwargs"),
    *("decoder_kwargs", "in_block_size", "out_block_size"),
)


@dataclass(frozen=True)
class Layout:
    """A model: our configuration, and the package's modules that hold its tensors.

    `kind`: "language", "vision" or "sequence"; `encoder`: the blocks of an encoder, if any; `lengths`: of its tables of
    positions; `unused`: prefixes of keys that no head reads.
    """

    kind: str
    settings: config.TransformerConfig
    block: PackageBlock
    encoder: PackageBlock | None = None
    retriever: SymbolRetriever | None = None
    lengths: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()


def plan(arguments: Mapping[str, Any]) -> Layout:
    """The model with these arguments.  Raises ValueError if the package has no such model or ours has no equivalent."""
    if set(arguments) == {"args", "kwargs"}:
        raise ValueError("config holds no arguments, as the package writes it when they are not given by name")
    for name, layout in (("vocab_size", _language), ("image_shape", _vision), ("input_spec", _sequence)):
        if name in arguments:
            return layout(arguments)
    raise ValueError("vocab_size, image_shape or input_spec missing: no model of the package has these arguments")


def _retriever(
    its: Mapping[str, Any], relational: bool = True, layers: Mapping[str, Any] | None = None
) -> SymbolRetriever:
    return retriever(its, its["d_model"], relational=relational, layers=layers)


def _of_block(its: Mapping[str, Any], dual: bool) -> dict[str, Any]:
    """The arguments of a model that are those of its blocks."""
    names = (*DUAL_BLOCK, *DUAL_OPTIONS) if dual else (*PLAIN_BLOCK, *BLOCK_OPTIONS)
    return {name: its[name] for name in names if name in its}


def _language(arguments: Mapping[str, Any]) -> Layout:
    dual = "n_heads_sa" in arguments or "n_heads_ra" in arguments
    wanted: dict[str, Any] = {"norm_type": "layernorm", "bias": True, "pos_enc_type": "pos_emb"}
    symbols = None
    if dual:
        wanted |= {name: value for name, value in DUAL_OPTIONS.items() if name != "causal"}
        wanted |= {"symbol_retrieval": "symbolic_attention", "symbol_retriever_config": None}
        its = options(arguments, (*LANGUAGE, *DUAL_BLOCK, *SYMBOLS), wanted)
        shared = {"shared_symbol_retriever": True, "weight_tie_symbol_library": False}
        if its["n_heads_ra"]:
            symbols = _retriever(its, relational=False, layers=part(its, "symbol_retriever_config", (), shared))
        own = {"bias": True}  # the package ignores the argument
    else:
        wanted |= {"use_flash_attention": True, "block_kwargs": None}
        its = options(arguments, (*LANGUAGE, *PLAIN_BLOCK), wanted)
        own = part(its, "block_kwargs", (), {"attn_kwargs": None})
    source = None if symbols is None else symbols.source
    blocks = block({**_of_block(its, dual), **own, "causal": True}, its["d_model"], dual=dual, source=source)
    positions = POSITIONS[one_of("arguments", "pos_enc_type", its["pos_enc_type"], POSITIONS)]
    if isinstance(positions, config.Rotary) and any(group.factor != 1.0 for group in blocks.groups):
        raise ValueError("with RoPE the package has no key_dim other than d_model / heads")
    known = its["max_block_size"] if symbols is None or symbols.length is None else symbols.length
    settings = config.TransformerConfig(
        inputs=config.Tokens(its["vocab_size"]),
        outputs=config.Logits(its["vocab_size"], tied=True),
        layers=its["n_layers"],
        positions=positions,
        max_length=min(its["max_block_size"], known),
        final_norm=True,
        **blocks.fields,
    )
    unused = ("layers.symbol_retrievers.",) if dual and symbols is None else ()
    return Layout("language", settings, blocks, retriever=symbols, lengths=(its["max_block_size"],), unused=unused)


def _vision(arguments: Mapping[str, Any]) -> Layout:
    dual = "n_heads_sa" in arguments or "n_heads_ra" in arguments
    wanted: dict[str, Any] = {"norm_type": "layernorm", "bias": True, "pool": "cls"}
    symbols = None
    if dual:
        wanted |= {"ra_type": "relational_attention", "ra_kwargs": None, "sa_kwargs": None}
        its = options(arguments, (*VISION, *DUAL_BLOCK, "symbol_retrieval", *SYMBOLS), wanted)
        symbols = _retriever(its) if its["n_heads_ra"] else None
    else:
        its = options(arguments, (*VISION, *PLAIN_BLOCK), wanted)
    blocks = block(_of_block(its, dual), its["d_model"], dual=dual, source=None if symbols is None else symbols.source)
    shape, size = (_integers(its, name, count) for name, count in (("image_shape", 3), ("patch_size", 2)))
    # Theirs are width before height; in a tensor of images the height comes first.
    inputs = config.Patches((shape[0], shape[2], shape[1]), (size[1], size[0]), norm=True, class_token=True)
    if symbols is not None and symbols.length is not None and symbols.length < inputs.count:
        raise ValueError(f"symbol_retrieval_kwargs: max_length must be {inputs.count} or more but is {symbols.length}")
    pool = {"cls": "class", "mean": "mean"}
    settings = config.TransformerConfig(
        inputs=inputs,
        outputs=config.Classes(its["num_classes"], pool=pool[one_of("arguments", "pool", its["pool"], pool)]),
        layers=its["n_layers"],
        positions=config.Learned(),
        max_length=inputs.count,
        final_norm=False,
        **blocks.fields,
    )
    unused = ("symbol_retriever.",) if dual and symbols is None else ()
    return Layout("vision", settings, blocks, retriever=symbols, unused=unused)


def _integers(its: Mapping[str, Any], name: str, count: int) -> tuple[int, ...]:
    value = its[name]
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{name} must be {count} positive integers but is {value!r}")
    return tuple(value)


def _sequence(arguments: Mapping[str, Any]) -> Layout:
    dual = "symbol_retrieval" in arguments or "symbol_retrieval_kwargs" in arguments
    retrieving = ("symbol_retrieval", *SYMBOLS) if dual else ()
    its = options(arguments, (*SEQUENCE, *retrieving), {"tie_weights": True, "loss_ignore_idx": -1})
    width, sides = its["d_model"], {}
    symbols = _retriever(its) if dual and any(_relational(its, side) for side in ("encoder", "decoder")) else None
    for side in ("encoder", "decoder"):
        source = None if symbols is None else symbols.source
        try:
            sides[side] = block(its[f"{side}_kwargs"], width, dual=dual, decoder=side == "decoder", source=source)
        except ValueError as error:
            raise ValueError(f"{side}_kwargs: {error}") from None
    known = None if symbols is None else symbols.length
    encoder = config.TransformerConfig(
        inputs=_spec(its, "input_spec"),
        outputs=config.Values(1),  # not used
        layers=its["n_layers_enc"],
        positions=config.Sinusoidal(),
        max_length=known or its["in_block_size"],  # the rows of a table that encoder and decoder share
        final_norm=False,
        **sides["encoder"].fields,
    )
    settings = config.TransformerConfig(
        inputs=_spec(its, "output_spec"),
        outputs=config.Logits(its["out_dim"], bias=True),
        layers=its["n_layers_enc" if dual else "n_layers_dec"],  # as the package counts them
        positions=config.Sinusoidal(),
        max_length=known or its["out_block_size"],
        final_norm=False,
        encoder=encoder,
        encoder_symbols=all(_relational(its, side) for side in ("encoder", "decoder")),
        **sides["decoder"].fields,
    )
    unused = ("layers.symbol_retriever.",) if dual and symbols is None else ()
    lengths = its["in_block_size"], its["out_block_size"]
    return Layout("sequence", settings, sides["decoder"], sides["encoder"], symbols, lengths=lengths, unused=unused)


def _relational(its: Mapping[str, Any], side: str) -> bool:
    return bool(its[f"{side}_kwargs"].get("n_heads_ra"))


def _spec(its: Mapping[str, Any], name: str) -> config.Input:
    """Tokens or vectors, multiplied by the root of the width (vectors: in the map itself)."""
    own = part(its, name, ("type",), {"vocab_size": None, "dim": None})
    kinds = {"token": "vocab_size", "vector": "dim"}
    size = kinds[one_of(name, "type", own["type"], kinds)]
    if own[size] is None:
        raise ValueError(f"{name}: {size} missing")
    return config.Tokens(own[size], scaled=True) if size == "vocab_size" else config.Vectors(own[size])
