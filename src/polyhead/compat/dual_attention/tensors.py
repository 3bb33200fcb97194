"""The mapping of the tensors of the package `dual-attention` to ours: each is a part of one of our tensors, times a
number.

Entries that no part covers are 0: those of the output projection between kinds of heads, and biases that the package
does not have.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from polyhead.compat.dual_attention.arguments import PackageBlock, PackageHeads, SymbolRetriever
from polyhead.compat.dual_attention.models import Layout
from polyhead.config import PositionSymbols, RelationalSymbols, RelativeSymbols, TransformerConfig, Vectors
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.feedforward import SwigluLayer
from polyhead.layers.heads.symbolic import DisentangledHeads, RelationalHeads
from polyhead.layers.norms import LayerNorm
from polyhead.models.transformer import Transformer

ALL = slice(None)


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of the package: all its names there, all names of our tensor, and the part of it.

    `factor`: ours / theirs.  `shape`: that of the package's tensor, if it differs from that of the part: reshaped, or
    with more rows than ours can use.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    where: tuple[slice, ...] = (ALL,)
    factor: float = 1.0
    shape: tuple[int, ...] | None = None


def _linear(theirs: str, ours: str, *, bias: bool = True, factor: float = 1.0) -> Iterator[TensorMapping]:
    for what in ("weight", "bias") if bias else ("weight",):
        yield TensorMapping((f"{theirs}.{what}",), (f"{ours}.{what}",), factor=factor)


# ------------------------------------------------------------------------------------------------------------ attention
def of_attention(
    layer: MultiHeadAttention, groups: Sequence[PackageHeads], theirs: str = "", ours: str = ""
) -> Iterator[TensorMapping]:
    """The tensors of a layer; their keys begin with `theirs`, our names with `ours`."""
    start = 0
    for i, group in enumerate(groups):
        size, prefix = layer.sizes[i], theirs + group.prefix
        sharing = groups[i + 1] if i + 1 < len(groups) and groups[i + 1].mechanism.share else None
        rows = [
            slice(first := sum(layer.widths[:n]) + sum(s.widths[n] for s in layer.sizes[:i]), first + size.widths[n])
            for n in range(3)
        ]
        if "q" in size.takes:
            yield from _queries_and_keys(group, sharing, rows, theirs, ours)
        value, where = (f"{ours}qkv", rows[2]) if group.kind == "sa" else (f"{ours}groups.{i}.value", ALL)
        for what in ("weight", "bias") if group.bias_kv else ("weight",):
            yield TensorMapping((f"{prefix}wv.{what}",), (f"{value}.{what}",), (where,))
        yield from _relations(layer.groups[i], prefix, f"{ours}groups.{i}.")
        square = slice(start, start := start + size.heads * size.value_dim)
        yield TensorMapping((f"{prefix}wo.weight",), (f"{ours}out.weight",), (square, square))
        if group.bias_out:
            yield TensorMapping((f"{prefix}wo.bias",), (f"{ours}out.bias",), (square,))


def _queries_and_keys(
    group: PackageHeads, sharing: PackageHeads | None, rows: Sequence[slice], theirs: str, ours: str
) -> Iterator[TensorMapping]:
    """Queries and keys of a group, and of the next group if it shares them; in the package both have the same
    modules."""
    both = (group,) if sharing is None else (group, sharing)
    stems = [theirs + g.prefix + "w{}" + ("" if g.kind in ("sa", "rca") else "_attn") for g in both]
    for letter, where, factor in (("q", rows[0], group.factor), ("k", rows[1], 1.0)):
        for what in ("weight", "bias") if letter == "k" and both[-1].bias_kv else ("weight",):
            keys = tuple(f"{stem.format(letter)}.{what}" for stem in stems)
            yield TensorMapping(keys, (f"{ours}qkv.{what}",), (where,), factor)


def _relations(heads: nn.Module, theirs: str, ours: str) -> Iterator[TensorMapping]:
    if isinstance(heads, (RelationalHeads, DisentangledHeads)):
        symmetric = heads.k_rel is None
        keys = (f"{theirs}wq_rel.weight", *((f"{theirs}wk_rel.weight",) if symmetric else ()))
        yield TensorMapping(keys, (f"{ours}q_rel.weight",))
        if not symmetric:
            yield TensorMapping((f"{theirs}wk_rel.weight",), (f"{ours}k_rel.weight",))
    if isinstance(heads, RelationalHeads):
        yield TensorMapping((f"{theirs}wr",), (f"{ours}relation_weight",))


# --------------------------------------------------------------------------------------------------------------- blocks
def of_block(block: TransformerBlock, its: PackageBlock, theirs: str = "", ours: str = "") -> Iterator[TensorMapping]:
    """The tensors of a block."""
    yield from of_attention(block.attention, its.groups, theirs, f"{ours}attention.")
    norms = ["norm1", "norm2"]
    if block.cross is not None:
        norms.insert(1, "norm_cross")
        yield from of_attention(block.cross, its.cross, theirs, f"{ours}cross.")
    for n, name in enumerate(norms, 1):
        yield from _linear(f"{theirs}norm{n}", f"{ours}{name}", bias=isinstance(block.norm1, LayerNorm))
    maps = ("w1", "w2", "w3") if isinstance(block.feedforward, SwigluLayer) else ("up", "down")
    for n, name in enumerate(maps, 1):
        bias = its.fields["feedforward"].bias
        yield from _linear(f"{theirs}ff_block.linear{n}", f"{ours}feedforward.{name}", bias=bias)


# -------------------------------------------------------------------------------------------------------------- symbols
def _of_symbols(
    symbols: SymbolRetriever, theirs: Sequence[str], ours: Sequence[str], settings: TransformerConfig
) -> Iterator[TensorMapping]:
    """The tensors of a source of symbols, which has several prefixes there and here."""
    for place in _of_source(symbols, settings):
        keys = tuple(prefix + name for prefix in theirs for name in place.keys)
        yield replace(place, keys=keys, names=tuple(prefix + name for prefix in ours for name in place.names))


def _of_source(symbols: SymbolRetriever, settings: TransformerConfig) -> Iterator[TensorMapping]:
    symbolic, related = symbols.factors
    if isinstance(symbols.source, PositionSymbols):
        shape = symbols.length or settings.max_length, settings.dim
        yield TensorMapping(("symbol_library.weight",), ("table",), shape=shape)
    elif isinstance(symbols.source, RelativeSymbols):
        yield TensorMapping(("rel_pos_enc.rel_pos_embeddings",), ("table",))
    else:
        theirs = ours = ""
        if isinstance(symbols.source, RelationalSymbols):
            theirs, ours = "symbolic_attention.", "symbolic."
            for name, our, factor in (("q_proj", "q", related), ("k_proj", "k", 1.0), ("model_dim_proj", "map", 1.0)):
                yield from _linear(name, our, factor=factor)
        yield TensorMapping((f"{theirs}template_features",), (f"{ours}templates",))
        yield TensorMapping((f"{theirs}symbol_library",), (f"{ours}library",))
        yield from _linear(f"{theirs}q_proj", f"{ours}query", factor=symbolic)


def _by_layer(symbols: SymbolRetriever, theirs: Sequence[str], settings: TransformerConfig) -> Iterator[TensorMapping]:
    """Sources with one module per layer; a shared library is one tensor."""
    ours = [f"blocks.{i}.symbols.0." for i in range(len(theirs))]
    tied = getattr(symbols.source, "tied", False)
    for i in range(len(theirs)):
        for place in _of_symbols(symbols, theirs[i : i + 1], ours[i : i + 1], settings):
            if not (tied and place.names[0].endswith("library")):
                yield place
    if tied:
        yield TensorMapping(
            tuple(f"{prefix}symbol_library" for prefix in theirs), tuple(f"{name}library" for name in ours)
        )


# --------------------------------------------------------------------------------------------------------------- models
def of_model(model: Transformer, plan: Layout) -> Iterator[TensorMapping]:
    """The tensors of a model of the package with this plan."""
    stem = {"language": "layers.blocks", "vision": "encoder_blocks", "sequence": "layers.decoder_blocks"}[plan.kind]
    for i, block in enumerate(_blocks(model)):
        yield from of_block(block, plan.block, f"{stem}.{i}.", f"blocks.{i}.")
    ends = {"language": _language, "vision": _vision, "sequence": _sequence}
    yield from ends[plan.kind](model, plan)


def _blocks(model: Transformer) -> list[TransformerBlock]:
    return list(model.blocks)  # type: ignore[arg-type]


def _language(model: Transformer, plan: Layout) -> Iterator[TensorMapping]:
    settings, symbols = plan.settings, plan.retriever
    tables = ("inputs.table.weight", "outputs.table.weight")
    yield TensorMapping(("layers.token_embedder.weight", "layers.final_out.weight"), tables)
    if model.positions is not None:
        yield TensorMapping(
            ("layers.positional_embedder.weight",), ("positions.table",), shape=(plan.lengths[0], settings.dim)
        )
    yield from _linear("layers.norm", "norm", bias=isinstance(model.norm, LayerNorm))
    if symbols is not None:
        theirs = [f"layers.symbol_retrievers.{i}." for i in range(settings.layers)]
        if symbols.source.shared:
            yield from _of_symbols(symbols, theirs, ("symbols.0.",), settings)
        else:
            yield from _by_layer(symbols, theirs, settings)


def _vision(model: Transformer, plan: Layout) -> Iterator[TensorMapping]:
    count, dim = plan.settings.max_length, plan.settings.dim
    for n, name in enumerate(("norm", "linear", "norm_out"), 1):
        yield from _linear(f"to_patch_embedding.{n}", f"inputs.{name}")
    yield TensorMapping(("pos_embedding",), ("positions.table",), shape=(1, count, dim))
    yield TensorMapping(("cls_token",), ("inputs.class_token.weight",), shape=(1, 1, dim))
    yield from _linear("final_out", "outputs.linear")
    if plan.retriever is not None:
        yield from _of_symbols(plan.retriever, ("symbol_retriever.",), ("symbols.0.",), plan.settings)


def _sequence(model: Transformer, plan: Layout) -> Iterator[TensorMapping]:
    settings, encoder = plan.settings, plan.settings.encoder
    assert plan.encoder is not None
    assert isinstance(model.encoder, Transformer)
    assert isinstance(encoder, TransformerConfig)
    for i, block in enumerate(_blocks(model.encoder)):
        prefixes = f"layers.encoder_blocks.{i}.", f"encoder.blocks.{i}."
        yield from of_block(block, plan.encoder, *prefixes)
    root = math.sqrt(settings.dim)
    for side, prefix, end in (("source", "encoder.", encoder.inputs), ("target", "", settings.inputs)):
        if isinstance(end, Vectors):  # the package multiplies vectors by the root of the width, ours does not
            yield from _linear(f"layers.{side}_embedder", f"{prefix}inputs.linear", factor=root)
        else:
            yield TensorMapping((f"layers.{side}_embedder.weight",), (f"{prefix}inputs.table.weight",))
    for what in ("weight", "bias"):  # its attempt to tie them leaves a second name
        keys = (f"layers.final_out.{what}", f"layers.target_embedder.weights.{what}")
        yield TensorMapping(keys, (f"outputs.linear.{what}",))
    if plan.retriever is not None:
        sides = [prefix for prefix, its in (("encoder.", model.encoder), ("", model)) if len(its.symbols)]
        names = [f"{prefix}symbols.0." for prefix in sides]
        yield from _of_symbols(plan.retriever, ("layers.symbol_retriever.",), names, settings)


# -------------------------------------------------------------------------------------------------------------- tensors
@torch.no_grad()
def fill(
    module: nn.Module, places: Sequence[TensorMapping], state: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> None:
    """Copy the tensors of `state` to our parameters and set all other entries to 0.

    `extra`: optional tensors, which must equal these up to rounding.  Raises ValueError for missing or unknown keys.
    """
    _compare_keys(set(state), places, extra)
    targets = module.state_dict()
    strange = targets.keys() - {name for place in places for name in place.names}
    assert all(name.endswith("bias") for name in strange), strange
    for target in targets.values():
        target.zero_()
    for place in places:
        value = _one(place.keys, state)
        for name in place.names:
            part = targets[name][place.where]
            wanted = place.shape or tuple(part.shape)
            if tuple(value.shape) != wanted:
                _misshapen(next(key for key in place.keys if key in state), wanted, value)
            rows = value[: len(part)] if value.ndim == part.ndim else value.reshape(part.shape)
            part.copy_(rows if place.factor == 1.0 else rows * place.factor)
    for key in extra.keys() & state.keys():
        value, same = state[key], extra[key]
        if value.shape != same.shape:
            _misshapen(key, tuple(same.shape), value)
        rounding = torch.finfo(value.dtype).eps
        if not torch.allclose(value.to(same), same, atol=max(1e-3, rounding)):
            raise ValueError(f"{key} is not what the package computes, which is all that ours can")


def _compare_keys(keys: set[str], places: Sequence[TensorMapping], extra: Mapping[str, Tensor]) -> None:
    missing = [place.keys[0] for place in places if keys.isdisjoint(place.keys)]
    unknown = sorted(keys - extra.keys() - {key for place in places for key in place.keys})
    found = (("missing", missing), ("unknown", unknown))
    problems = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in found
        if names
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _one(keys: Sequence[str], state: Mapping[str, Tensor]) -> Tensor:
    """The tensor of these names; a file may have it under only one of them."""
    there = [key for key in keys if key in state]
    first = state[there[0]]
    for key in there[1:]:
        if state[key].data_ptr() != first.data_ptr() and not torch.equal(state[key], first):
            raise ValueError(f"{there[0]} and {key} are one tensor in the package but differ")
    return first


def _misshapen(key: str, wanted: tuple[int, ...], value: Tensor) -> NoReturn:
    raise ValueError(f"{key} must be {wanted} but is {tuple(value.shape)}")
