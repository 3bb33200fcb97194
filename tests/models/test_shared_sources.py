"""Symbol sources shared by layers, and by encoder and decoder; causal direction."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import polyhead as ph
from polyhead.config import digest, from_dict, to_dict
from polyhead.models.generate.tokens import greedy
from polyhead.models.size import parameters
from polyhead.tasks import PairwiseOrder

LIBRARY = ph.SymbolicAttention(count=5, shared=False)
PLAIN = ph.TransformerConfig(
    ph.Tokens(7), ph.Logits(7), dim=16, layers=3, heads=ph.Relational(2, symbols=LIBRARY), max_length=9
)


def with_source(source, **fields):
    return replace(PLAIN, heads=[ph.Softmax(2), ph.Relational(2, symbols=source)], **fields)


def build(settings):
    torch.manual_seed(0)
    return ph.Transformer(settings, dtype=torch.float64)


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


def test_a_frozen_library_may_be_tied():
    model = build(with_source(replace(LIBRARY, tied=True, trainable=False)))
    assert_close(model.blocks[0].symbols[0].library, model.blocks[2].symbols[0].library)
    assert not [name for name, _ in model.named_parameters() if name.endswith("library")]


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


def test_neighbours_may_be_those_before_in_a_model_that_sees_all():
    """`causal` of relational symbols: their own, or the model's."""
    steps = {
        (model, own): build(with_source(ph.RelationalSymbols(causal=own), causal=model)).symbols[0].steps
        for model in (False, True)
        for own in (None, False, True)
    }
    before, around = (-1, -2), (-2, -1, 1, 2)
    assert steps == {
        (False, None): around,
        (False, False): around,
        (False, True): before,
        (True, None): before,
        (True, False): around,
        (True, True): before,
    }


def test_new_fields_are_late_and_are_read_back():
    task = PairwiseOrder()
    for settings in (PLAIN, pair(SHARED[0]), with_source(replace(LIBRARY, tied=True)), pair(SHARED[3])):
        run = ph.Run(task=task, model=settings)
        assert from_dict(to_dict(run), [PairwiseOrder]) == run
    assert digest(replace(LIBRARY, tied=True)) != digest(LIBRARY)
    assert digest(pair(SHARED[0])) != digest(replace(pair(SHARED[0]), encoder_symbols=False))
    for default, name in ((LIBRARY, "tied"), (ph.RelationalSymbols(), "causal"), (PLAIN, "encoder_symbols")):
        assert name not in to_dict(default, semantic=True)


def test_mistakes_are_one_line():
    encoder = with_source(ph.PositionSymbols(shared=False))
    with pytest.raises(ValueError, match=r"^TransformerConfig: encoder_symbols, but the encoder has no shared Posit"):
        with_source(ph.PositionSymbols(), encoder=encoder, encoder_symbols=True)
    with pytest.raises(ValueError, match=r"^TransformerConfig: encoder_symbols are those of an encoder that is a tr"):
        with_source(ph.PositionSymbols(), encoder_symbols=True)
    with pytest.raises(ValueError, match=r"^TransformerConfig: RelationalSymbols that an encoder lends need causal="):
        pair(ph.RelationalSymbols())


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("source", [LIBRARY, ph.RelationalSymbols(count=5, shared=False)])
def test_a_tied_library_stays_one(source, trainable):
    """Off the meta device, after a cast, and when a state is loaded by assigning."""
    settings = with_source(replace(source, tied=True, trainable=trainable))
    model, empty = build(settings), ph.Transformer(settings, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assigned = ph.Transformer(settings, device="meta")
    assigned.load_state_dict(model.state_dict(), assign=True)
    for made in (model, empty, assigned, torch.nn.Sequential(empty).half()[0]):
        state = made.state_dict(keep_vars=True)
        assert len({id(value) for name, value in state.items() if name.endswith("library")}) == 1
        assert len(list(made.parameters())) == len(list(model.parameters()))
    tokens = torch.randint(7, (2, 6))
    assert_close(assigned(tokens), model(tokens))
