"""Symbols of a transformer: from the stream of each layer or from the embedded input; sources that layers share, or
encoder and decoder; neighbours."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import Cache
from polyhead.models.generate.tokens import greedy
from polyhead.models.size import parameters

F64 = torch.float64
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
    torch.manual_seed(0)
    model = ph.Transformer(replace(BASE, heads=layers, **options), dtype=F64).eval()
    return model, torch.randint(9, (2, 6))


def test_once_is_off_the_embedded_input_also_in_later_layers():
    once = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, once=True))
    own = ph.Relational(2, symbols=ph.SymbolicAttention(count=4, once=True, shared=False))
    model, x = make([ph.Softmax(4)], [once, own], [own, once])
    blocks = model.blocks
    wanted = layer_by_layer(
        *(model, x),
        lambda i, stream, embedded: (
            None,
            [model.symbols[0](embedded), blocks[1].symbols[0](embedded) if i == 1 else None],
            [blocks[2].symbols[0](embedded) if i == 2 else None, model.symbols[0](embedded)],
        )[i],
    )
    assert_close(model(x), wanted, atol=1e-12, rtol=1e-12)


def test_equal_sources_are_one_and_others_are_not():
    relative = ph.Relational(2, symbols=ph.RelativeSymbols(2))
    library = ph.Relational(2, symbols=ph.SymbolicAttention(count=5))
    own = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False))
    model, x = make([relative, library], [library, library], [own, own])
    assert len(model.symbols) == 2
    assert [len(getattr(block, "symbols", ())) for block in model.blocks] == [0, 0, 1]
    names = [name for name, _ in model.named_parameters() if "library" in name or name.endswith("symbols.0.table")]
    assert names == ["symbols.0.table", "symbols.1.library", "blocks.2.symbols.0.library"]
    relative_table, source, last = model.symbols[0].table, model.symbols[1], model.blocks[2].symbols[0]
    wanted = layer_by_layer(
        *(model, x), lambda i, stream, _: ([relative_table, source(stream)], source(stream), last(stream))[i]
    )
    assert_close(model(x), wanted, atol=1e-12, rtol=1e-12)


def test_the_blocks_of_a_decoder_read_their_context_once():
    reads = replace(BASE, layers=1)
    cross = [ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=5))]
    model = ph.Transformer(replace(BASE, causal=True, encoder=reads, cross_heads=cross), dtype=F64).eval()
    asked = []
    model.cross_symbols[0].register_forward_pre_hook(lambda module, args: asked.append(args[0]))
    x, source = torch.randint(9, (2, 4)), torch.randint(9, (2, 6))
    y = model(x, source=source)
    assert len(asked) == 1
    assert_close(asked[0], model.encode(source))
    with torch.no_grad():
        model.cross_symbols[0].library.mul_(2.0)
    assert not torch.allclose(model(x, source=source), y)


@torch.no_grad()  # only leaves can be copied
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
@pytest.mark.parametrize("padded", [False, True])
def test_a_copied_cache_holds_the_neighbours(copied, padded):
    """Two sources in each layer; a prompt is decoded once and continued from a copy of its cache."""
    sources = [ph.RelationalSymbols(count=5), ph.RelationalSymbols(count=4, neighbours=3, shared=False)]
    model, x = make(*[[ph.Relational(2, symbols=source) for source in sources]] * 3, causal=True)
    mask = torch.tensor([[False, False, True, True], [True] * 4]) if padded else None
    caches = [Cache(3) for _ in range(2)]
    for cache in caches:
        model(x[:, :4], mask=mask, cache=cache)
    again = copied(caches[0])
    assert_close(model(x[:, 4:], cache=again), model(x[:, 4:], cache=caches[1]), atol=1e-12, rtol=1e-12)
    assert not any(isinstance(name, torch.nn.Module) for name in again[0]._kept)


@pytest.mark.parametrize("order", [(0, 2), (2, 0), (0, 2, 2)])
def test_blocks_that_are_dropped_or_used_twice_read_their_own_sources(order):
    own = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False))
    model, x = make([own], [own], [own])
    model.blocks = torch.nn.ModuleList(model.blocks[i] for i in order)
    wanted = layer_by_layer(model, x, lambda i, stream, _: model.blocks[i].symbols[0](stream))
    taps, stream = [], []
    assert_close(model(x, taps=taps, stream=stream), wanted, atol=1e-12, rtol=1e-12)
    assert_close(taps[1].groups[0].assignments, model.blocks[1].symbols[0].assignments(stream[1]))


@torch.no_grad()
def test_a_model_without_its_first_block_has_a_cache_for_the_others():
    own = ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False))
    model = ph.Transformer(replace(BASE, layers=3, causal=True, heads=own), dtype=F64).eval()
    model.blocks = torch.nn.ModuleList(model.blocks[i] for i in (1, 2))
    x, cache = torch.randint(9, (2, 5)), ph.Cache(2)
    cached = torch.cat([model(x[:, :3], cache=cache), model(x[:, 3:], cache=cache)], dim=1)
    assert_close(cached, model(x), atol=1e-12, rtol=1e-12)


# ---------------------------------------------------------------------------------------------------- shared and tied
LIBRARY = ph.SymbolicAttention(count=5, shared=False)
PLAIN = ph.TransformerConfig(
    ph.Tokens(7), ph.Logits(7), dim=16, layers=3, heads=ph.Relational(2, symbols=LIBRARY), max_length=9
)


def with_source(source, **fields):
    return replace(PLAIN, heads=[ph.Softmax(2), ph.Relational(2, symbols=source)], **fields)


def build(settings):
    torch.manual_seed(0)
    return ph.Transformer(settings, dtype=F64)


@pytest.mark.parametrize("source", [LIBRARY, ph.RelationalSymbols(count=5, shared=False)])
def test_a_tied_library_is_one_parameter_with_queries_and_templates_of_each_layer(source):
    apart, tied = with_source(source), with_source(replace(source, tied=True))
    assert parameters(apart) - parameters(tied) == 2 * 5 * 16
    model = build(tied)
    libraries = [p for name, p in model.named_parameters(remove_duplicate=False) if name.endswith("library")]
    assert len(libraries) == 3
    assert len({id(library) for library in libraries}) == 1
    asking = [p for name, p in model.named_parameters(remove_duplicate=False) if name.endswith("templates")]
    assert len({id(p) for p in asking}) == 3
    same, tokens = build(apart), torch.randint(7, (2, 6))
    same.load_state_dict(model.state_dict())
    assert_close(model(tokens), same(tokens))
    for each in (model, same):
        each(tokens).square().sum().backward()
    gradients = [p.grad for name, p in same.named_parameters() if name.endswith("library")]
    assert_close(libraries[0].grad, sum(gradients))
    assert all(g.abs().max() > 1e-6 for g in gradients)


SHARED = [
    ph.SymbolicAttention(count=5),
    ph.PositionSymbols(),
    ph.RelativeSymbols(distance=3),
    ph.RelationalSymbols(causal=True),
]


def pair(source, **fields):
    encoder = with_source(source, layers=1)
    return with_source(source, causal=True, encoder=encoder, encoder_symbols=True, **fields)


@pytest.mark.parametrize("source", SHARED, ids=lambda s: type(s).__name__)
def test_a_decoder_reads_the_sources_of_its_encoder(source):
    settings = pair(source)
    model, apart = build(settings), build(replace(settings, encoder_symbols=False))
    assert model.symbols[0] is model.encoder.symbols[0]
    assert apart.symbols[0] is not apart.encoder.symbols[0]
    one = sum(p.numel() for p in model.symbols.parameters())
    assert parameters(replace(settings, encoder_symbols=False)) - parameters(settings) == one > 0
    apart.load_state_dict(model.state_dict())
    tokens, words = torch.randint(7, (2, 8)), torch.randint(7, (2, 5))
    assert_close(model(words, source=tokens), apart(words, source=tokens))
    later = words.clone()
    later[:, -1] = (later[:, -1] + 1) % 7
    assert_close(model(later, source=tokens)[:, :-1], model(words, source=tokens)[:, :-1])
    cached, not_cached = (greedy(model, words[:, :1], source=tokens, steps=5, use_cache=use) for use in (True, False))
    assert torch.equal(cached, not_cached)
    for p in model.parameters():
        p.grad = None
    model(words, source=tokens).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.symbols.parameters())


def test_mistakes_are_one_line():
    encoder = with_source(ph.PositionSymbols(shared=False))
    positions, lent = ph.PositionSymbols(), {"encoder_symbols": True}
    for call, text in (
        (lambda: with_source(positions, encoder=encoder, **lent), "but the encoder has no shared Posit"),
        (lambda: with_source(positions, **lent), "encoder_symbols are those of an encoder that is a tr"),
        (lambda: pair(ph.RelationalSymbols()), "RelationalSymbols that an encoder lends need causal="),
    ):
        refused(call, f"^TransformerConfig: .*{text}")


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("source", [LIBRARY, ph.RelationalSymbols(count=5, shared=False)])
def test_a_tied_library_stays_one(source, trainable):
    """Off the meta device, after a cast, and when a state is loaded by assigning."""
    settings = with_source(replace(source, tied=True, trainable=trainable))
    model, empty = build(settings), ph.Transformer(settings, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    assigned = ph.Transformer(settings, device="meta")
    assigned.load_state_dict(model.state_dict(), assign=True)
    for made in (model, empty, assigned, torch.nn.Sequential(empty).half()[0]):
        state = made.state_dict(keep_vars=True)
        assert len({id(value) for name, value in state.items() if name.endswith("library")}) == 1
        assert len(list(made.parameters())) == len(list(model.parameters()))
    tokens = torch.randint(7, (2, 6))
    assert_close(assigned(tokens), model(tokens))
