"""Left-padded rows of several lengths get the logits of each row alone: in one pass, and step by step."""

import itertools
from dataclasses import replace

import pytest
import torch
import zoo
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache
from polyhead.layers.symbols import build_symbols

F64 = torch.float64
NEAR = ph.RelationalSymbols(count=5, neighbours=3)
HEADS = {
    "neighbours": [ph.Relational(4, symbols=NEAR)],
    "neighbours once": [ph.Disentangled(4, symbols=ph.RelationalSymbols(count=5, once=True, include_self=True))],
    "mixture": [ph.Softmax(1), ph.Hyla(1), ph.Relational(1, symbols=ph.PositionSymbols()), ph.Linear(1, dim=4)],
} | zoo.MIXTURES
MODELS = zoo.models(HEADS, max_length=16)
LENGTHS = (9, 1, 4)
T = max(LENGTHS)


def make(name, **options):
    return zoo.make_model(replace(MODELS[name], **options))


def padded(lengths=LENGTHS):
    """Tokens, of which some are padding, which are real, and the place of each among the real ones of its row."""
    x = torch.randint(12, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return x, real, (real.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def compare(model, logits, x, real):
    for row, tokens, here in zip(logits, x, real, strict=True):
        assert_close(row[here], model(tokens[here][None])[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("heads", "positions"), zoo.turns([*MODELS], [*zoo.POSITIONS]))
@torch.no_grad()
def test_padded_rows_equal_single_ones(heads, positions):
    model = make(heads, positions=zoo.POSITIONS[positions])
    x, real, places = padded()
    whole = model(x, mask=real, positions=places)
    compare(model, whole, x, real)
    assert_close(model(x, mask=real, positions=places, tail=2), whole[:, -2:])
    cache, parts = Cache(2), []
    for first, last in ((0, 2), (2, 6), (6, 7), (7, 9)):  # the row of one token is padding in three of these
        here = slice(first, last)
        mask = None if real[:, here].all() else real[:, here]
        parts.append(model(x[:, here], mask=mask, positions=places[:, here], cache=cache))
    compare(model, torch.cat(parts, 1), x, real)


@torch.no_grad()
def test_without_positions_padding_counts():
    """Rows begin at the place where their first real token stands."""
    x, real, _ = padded((4, 2))
    model = make("mixture", positions=ph.Learned())
    shifted = model(x, mask=real)
    assert_close(shifted[0], model(x[:1])[0])
    assert not torch.allclose(shifted[1, 2:], model(x[1:, 2:])[0])
    assert_close(shifted[1, 2:], model(x[1:, 2:], positions=torch.tensor([[2, 3]]))[0])


def test_tokens_at_padding_have_no_influence():
    """Neither the tokens at padding nor their positions."""
    for name in ("neighbours", "mixture", "neighbours once"):
        model = make(name, positions=ph.Learned())
        x, real, places = padded()
        wanted = model(x, mask=real, positions=places)[real]
        other = torch.where(real, x, 11 - x), torch.where(real, places, 7)
        assert_close(model(other[0], mask=real, positions=other[1])[real], wanted, atol=0.0, rtol=0.0)


def test_neighbours_in_pieces_meet_no_padding():
    """Padding in front and within, in any division into calls: as in one call."""
    source = build_symbols(ph.RelationalSymbols(count=5, neighbours=2, relations=2), 6, causal=True).double()
    x, real = torch.randn(3, 9, 6, dtype=F64), torch.ones(3, 9, dtype=torch.bool)
    real[0, :4] = real[1, 3:7] = False
    whole = source(x, mask=real)
    for cuts in ((0, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 3, 5, 8, 9)):
        cache, parts = LayerCache(), []
        for a, b in itertools.pairwise(cuts):
            mask = None if real[:, a:b].all() else real[:, a:b]
            parts.append(source(x[:, a:b], mask=mask, cache=cache, first=a))
        assert_close(torch.cat(parts, 1)[real], whole[real])
    assert_close(whole[:1, 4:], source(x[:1, 4:]))
