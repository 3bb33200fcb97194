"""The tensors of the package `dual-attention` as parts of ours.

Entries that no part covers are 0: those of the output projection between kinds of heads, and biases that the package
does not have.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from polyhead.compat.dual_attention.arguments import Layout, PackageHeads
from polyhead.compat.mapping import TensorMapping, of_linear
from polyhead.config import Mlp, PositionSymbols, RelativeSymbols, Swiglu
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.heads.symbolic import DisentangledHeads, RelationalHeads
from polyhead.layers.norms import LayerNorm
from polyhead.models.transformer import Transformer


def of_attention(
    layer: MultiHeadAttention, groups: Sequence[PackageHeads], key_prefix: str, name_prefix: str
) -> Iterator[TensorMapping]:
    """Yield the tensors of a layer; the package's keys begin with `key_prefix`, our names with `name_prefix`."""
    first_output = 0
    for i, group in enumerate(groups):
        size = layer.sizes[i]
        prefix = key_prefix + group.prefix
        group_name = f"{name_prefix}groups.{i}"

        # Rows of qkv are the queries of all groups, then keys of all groups, then values.
        rows = []
        for role in range(3):
            start = sum(layer.widths[:role]) + sum(previous.widths[role] for previous in layer.sizes[:i])
            rows.append(slice(start, start + size.widths[role]))

        if "q" in size.takes:
            yield from _queries_and_keys(groups[i : i + 2], rows, key_prefix, name_prefix)
        value_name = f"{group_name}.value"
        value_rows = slice(None)
        if group.kind == "softmax":
            value_name = f"{name_prefix}qkv"
            value_rows = rows[2]
        yield from of_linear(f"{prefix}wv", name=value_name, bias=group.has_bias_kv, rows=value_rows)
        yield from _relations(layer.groups[i], prefix, group_name)

        # The output projections are the diagonal blocks of ours.
        outputs = slice(first_output, first_output + size.heads * size.value_dim)
        first_output = outputs.stop
        yield TensorMapping((f"{prefix}wo.weight",), (f"{name_prefix}out.weight",), (outputs, outputs))
        if group.has_bias_out:
            yield TensorMapping((f"{prefix}wo.bias",), (f"{name_prefix}out.bias",), (outputs,))


def _queries_and_keys(
    groups: Sequence[PackageHeads], rows: Sequence[slice], key_prefix: str, name_prefix: str
) -> Iterator[TensorMapping]:
    """Queries and keys of the first group; the next one has the same modules in the package if it shares them."""
    owners = [groups[0]]
    if len(groups) > 1 and groups[1].mechanism.share:
        owners.append(groups[1])
    q_keys = []
    k_keys = []
    for owner in owners:
        suffix = "" if owner.kind in ("softmax", "rca") else "_attn"
        q_keys.append(f"{key_prefix}{owner.prefix}wq{suffix}")
        k_keys.append(f"{key_prefix}{owner.prefix}wk{suffix}")
    name = f"{name_prefix}qkv"
    yield from of_linear(*q_keys, name=name, bias=False, rows=rows[0])
    yield from of_linear(*k_keys, name=name, bias=owners[-1].has_bias_kv, rows=rows[1])


def _relations(heads: nn.Module, prefix: str, group_name: str) -> Iterator[TensorMapping]:
    if isinstance(heads, (RelationalHeads, DisentangledHeads)):
        q_keys, k_key = [f"{prefix}wq_rel"], f"{prefix}wk_rel"
        if heads.k_rel is None:  # symmetric relations
            q_keys.append(k_key)
        else:
            yield from of_linear(k_key, name=f"{group_name}.k_rel", bias=False)
        yield from of_linear(*q_keys, name=f"{group_name}.q_rel", bias=False)
    if isinstance(heads, RelationalHeads):
        yield TensorMapping((f"{prefix}wr",), (f"{group_name}.relation_weight",))


def of_model(model: Transformer, layout: Layout) -> Iterator[TensorMapping]:
    """Yield the tensors of a language model."""
    tables = ("inputs.table.weight", "outputs.table.weight")
    yield TensorMapping(("layers.token_embedder.weight", "layers.final_out.weight"), tables)
    if model.positions is not None:
        yield TensorMapping(("layers.positional_embedder.weight",), ("positions.table",))
    yield from of_linear("layers.norm", name="norm", bias=isinstance(model.norm, LayerNorm))
    for i, block in enumerate(model.blocks):
        yield from _block(block, layout, f"layers.blocks.{i}.", f"blocks.{i}.")  # type: ignore[arg-type]
    if layout.source is None:
        return
    if isinstance(layout.source, PositionSymbols):
        names = {"symbol_library.weight": "table"}
    elif isinstance(layout.source, RelativeSymbols):
        names = {"rel_pos_enc.rel_pos_embeddings": "table"}
    else:
        names = {
            "template_features": "templates",
            "symbol_library": "library",
            "q_proj.weight": "query.weight",
            "q_proj.bias": "query.bias",
        }

    # A shared source has the names of all layers in the package.
    layers = range(layout.settings.layers)
    for key, name in names.items():
        keys = tuple(f"layers.symbol_retrievers.{i}.{key}" for i in layers)
        if layout.source.shared:
            yield TensorMapping(keys, (f"symbols.0.{name}",))
        else:
            for i in layers:
                yield TensorMapping((keys[i],), (f"blocks.{i}.symbols.0.{name}",))


def _block(block: TransformerBlock, layout: Layout, key_prefix: str, name_prefix: str) -> Iterator[TensorMapping]:
    yield from of_attention(block.attention, layout.groups, key_prefix, f"{name_prefix}attention.")
    has_norm_bias = isinstance(block.norm1, LayerNorm)
    for name in ("norm1", "norm2"):
        yield from of_linear(f"{key_prefix}{name}", name=f"{name_prefix}{name}", bias=has_norm_bias)
    feedforward = layout.settings.feedforward
    maps = ("w1", "w2", "w3") if isinstance(feedforward, Swiglu) else ("up", "down")
    has_bias = isinstance(feedforward, (Mlp, Swiglu)) and feedforward.bias
    for number, name in enumerate(maps, 1):
        key = f"{key_prefix}ff_block.linear{number}"
        yield from of_linear(key, name=f"{name_prefix}feedforward.{name}", bias=has_bias)
