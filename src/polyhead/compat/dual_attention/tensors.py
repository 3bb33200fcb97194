"""The tensors of the package `dual-attention` as parts of ours.

Entries that no part covers are 0: those of the output projection between kinds of heads, and biases that the package
does not have.
"""

from collections.abc import Iterator

from polyhead.compat.mapping import TensorMapping, of_linear
from polyhead.config import Mlp, PositionSymbols, Relational, RelativeSymbols, Swiglu, SymbolSource
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.heads.symbolic import RelationalHeads
from polyhead.layers.norms import LayerNorm
from polyhead.models.transformer import Transformer


def of_model(model: Transformer, *, is_dual: bool) -> Iterator[TensorMapping]:
    """Yield the tensors of a language model, with dual attention or without."""
    tables = ("inputs.table.weight", "outputs.table.weight")
    yield TensorMapping(("layers.token_embedder.weight", "layers.final_out.weight"), tables)
    if model.positions is not None:
        yield TensorMapping(("layers.positional_embedder.weight",), ("positions.table",))
    has_norm_bias = isinstance(model.norm, LayerNorm)
    yield from of_linear("layers.norm", name="norm", bias=has_norm_bias)
    feedforward = model.config.feedforward
    maps = ("w1", "w2", "w3") if isinstance(feedforward, Swiglu) else ("up", "down")
    has_bias = isinstance(feedforward, (Mlp, Swiglu)) and feedforward.bias
    for i, block in enumerate(model.blocks):
        key_prefix, name_prefix = f"layers.blocks.{i}.", f"blocks.{i}."
        attention: MultiHeadAttention = block.attention  # type: ignore[assignment]
        yield from _attention(attention, key_prefix, f"{name_prefix}attention.", is_dual=is_dual)
        for name in ("norm1", "norm2"):
            yield from of_linear(f"{key_prefix}{name}", name=f"{name_prefix}{name}", bias=has_norm_bias)
        for number, name in enumerate(maps, 1):
            key = f"{key_prefix}ff_block.linear{number}"
            yield from of_linear(key, name=f"{name_prefix}feedforward.{name}", bias=has_bias)
    for group in model.config.layer_heads(0):
        if isinstance(group, Relational):
            yield from _symbols(group.symbols, model.config.layers)


def _attention(
    layer: MultiHeadAttention, key_prefix: str, name_prefix: str, *, is_dual: bool
) -> Iterator[TensorMapping]:
    """Yield the tensors of a layer; the package's keys begin with `key_prefix`, our names with `name_prefix`."""
    first_output = 0
    # Rows of qkv are the queries of all groups, then keys of all groups, then values: where each role goes on.
    starts = [0, layer.widths[0], layer.widths[0] + layer.widths[1]]
    for i, (group, size) in enumerate(zip(layer.groups, layer.sizes, strict=True)):
        rows = []
        for role, width in enumerate(size.widths):
            rows.append(slice(starts[role], starts[role] + width))
            starts[role] += width
        qkv = f"{name_prefix}qkv"
        if isinstance(group, RelationalHeads):
            prefix, group_name = f"{key_prefix}dual_attn.relational_attention.", f"{name_prefix}groups.{i}"
            yield from of_linear(f"{prefix}wq_attn", name=qkv, bias=False, rows=rows[0])
            yield from of_linear(f"{prefix}wk_attn", name=qkv, bias=False, rows=rows[1])
            yield from of_linear(f"{prefix}wv", name=f"{group_name}.value", bias=False)
            yield from _relations(group, prefix, group_name)
        else:
            prefix = f"{key_prefix}dual_attn.self_attention." if is_dual else f"{key_prefix}self_attn."
            for part, part_rows in zip("qkv", rows, strict=True):
                yield from of_linear(f"{prefix}w{part}", name=qkv, bias=False, rows=part_rows)

        # The output projections are the diagonal blocks of ours.
        outputs = slice(first_output, first_output + size.heads * size.value_dim)
        first_output = outputs.stop
        yield TensorMapping((f"{prefix}wo.weight",), (f"{name_prefix}out.weight",), (outputs, outputs))
        if layer.out.bias is not None:
            yield TensorMapping((f"{prefix}wo.bias",), (f"{name_prefix}out.bias",), (outputs,))


def _relations(heads: RelationalHeads, prefix: str, group_name: str) -> Iterator[TensorMapping]:
    q_keys, k_key = [f"{prefix}wq_rel"], f"{prefix}wk_rel"
    if heads.k_rel is None:  # symmetric relations
        q_keys.append(k_key)
    else:
        yield from of_linear(k_key, name=f"{group_name}.k_rel", bias=False)
    yield from of_linear(*q_keys, name=f"{group_name}.q_rel", bias=False)
    yield TensorMapping((f"{prefix}wr",), (f"{group_name}.relation_weight",))


def _symbols(source: SymbolSource, num_layers: int) -> Iterator[TensorMapping]:
    if isinstance(source, PositionSymbols):
        names = {"symbol_library.weight": "table"}
    elif isinstance(source, RelativeSymbols):
        names = {"rel_pos_enc.rel_pos_embeddings": "table"}
    else:
        names = {
            "template_features": "templates",
            "symbol_library": "library",
            "q_proj.weight": "query.weight",
            "q_proj.bias": "query.bias",
        }
    for key, name in names.items():
        keys = tuple(f"layers.symbol_retrievers.{i}.{key}" for i in range(num_layers))
        # A shared source has the names of all layers in the package.
        if source.shared:
            yield TensorMapping(keys, (f"symbols.0.{name}",))
        else:
            for i, own_key in enumerate(keys):
                yield TensorMapping((own_key,), (f"blocks.{i}.symbols.0.{name}",))
