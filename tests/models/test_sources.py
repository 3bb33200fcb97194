"""Symbols of a transformer: from the stream of each layer or from the embedded input; sources that layers share, or
encoder and decoder; neighbours."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from zoo import fresh

import polyhead as ph
from polyhead.layers.cache import Cache

BASE = ph.TransformerConfig(
    ph.Tokens(9), ph.Logits(9), dim=16, layers=3, heads=ph.Softmax(4), positions=ph.Learned(), max_length=8
)


def layer_by_layer(model, x, symbols):
    """The model with the symbols that `symbols(layer, stream, embedded)` names."""
    stream = embedded = model.inputs(x) + model.positions.table[: x.shape[1]]
    for i, block in enumerate(model.blocks):
        stream = block(stream, symbols=symbols(i, stream, embedded))
    return model.outputs(model.norm(stream))


def make(*layers, **options):
    return fresh(replace(BASE, heads=layers, **options)), torch.randint(9, (2, 6))


def test_once_is_off_the_embedded_input_also_in_later_layers():
    once = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, once=True))
    unshared = ph.Relational(2, symbols=ph.SymbolicAttention(count=4, once=True, shared=False))
    model, x = make([ph.Softmax(4)], [once, unshared], [unshared, once])
    blocks = model.blocks

    def symbols(i, stream, embedded):
        if i == 0:
            return None
        common, separate = model.symbols[0](embedded), blocks[i].symbols[0](embedded)
        return [common, separate] if i == 1 else [separate, common]

    assert_close(model(x), layer_by_layer(model, x, symbols), atol=1e-12, rtol=1e-12)


def test_equal_sources_are_one_and_others_are_not():
    relative = ph.Relational(2, symbols=ph.RelativeSymbols(2))
    library = ph.Relational(2, symbols=ph.SymbolicAttention(count=5))
    unshared = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False))
    model, x = make([relative, library], [library, library], [unshared, unshared])
    assert len(model.symbols) == 2
    assert [len(getattr(block, "symbols", ())) for block in model.blocks] == [0, 0, 1]
    names = [name for name, _ in model.named_parameters() if "library" in name or name.endswith("symbols.0.table")]
    assert names == ["symbols.0.table", "symbols.1.library", "blocks.2.symbols.0.library"]
    relative_table, source, last = model.symbols[0].table, model.symbols[1], model.blocks[2].symbols[0]

    def symbols(i, stream, embedded):
        if i == 0:
            return [relative_table, source(stream)]
        return source(stream) if i == 1 else last(stream)

    assert_close(model(x), layer_by_layer(model, x, symbols), atol=1e-12, rtol=1e-12)


@torch.no_grad()  # only leaves can be copied
@pytest.mark.parametrize("copy_cache", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("padded", [False, True])
def test_a_copied_cache_holds_the_neighbours(copy_cache, padded):
    """Two sources in each layer; a prompt is decoded once and continued from a copy of its cache."""
    sources = [ph.RelationalSymbols(count=5), ph.RelationalSymbols(count=4, neighbours=3, shared=False)]
    model, x = make(*[[ph.Relational(2, symbols=source) for source in sources]] * 3, causal=True)
    mask = torch.tensor([[False, False, True, True], [True] * 4]) if padded else None
    caches = [Cache(3) for _ in range(2)]
    for cache in caches:
        model(x[:, :4], mask=mask, cache=cache)
    copied = copy_cache(caches[0])
    assert_close(model(x[:, 4:], cache=copied), model(x[:, 4:], cache=caches[1]), atol=1e-12, rtol=1e-12)
    assert not any(isinstance(name, torch.nn.Module) for name in copied[0]._tensors_by_name)


@pytest.mark.parametrize("order", [(0, 2), (2, 0), (0, 2, 2)])
@torch.no_grad()
def test_blocks_that_are_dropped_or_used_twice_read_their_own_sources(order):
    unshared = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False))
    model, x = make([unshared], [unshared], [unshared], causal=True)
    model.blocks = torch.nn.ModuleList(model.blocks[i] for i in order)
    expected = layer_by_layer(model, x, lambda i, stream, _: model.blocks[i].symbols[0](stream))
    taps, stream, cache = [], [], Cache(len(order))
    assert_close(model(x, taps=taps, stream=stream), expected, atol=1e-12, rtol=1e-12)
    assert_close(taps[1].groups[0].assignments, model.blocks[1].symbols[0].assignments(stream[1]))
    cached = torch.cat([model(x[:, :3], cache=cache), model(x[:, 3:], cache=cache)], dim=1)
    assert_close(cached, expected, atol=1e-12, rtol=1e-12)
