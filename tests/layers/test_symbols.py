"""Symbol sources: their definitions with Python loops, parameters, initialisation, refusals."""

import re

import pytest
import torch
from refusals import refused
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import LayerCache
from polyhead.layers.symbols import build_symbols

F64 = torch.float64


def softmax(scores):
    e = [torch.exp(s - max(scores)) for s in scores]
    return [a / sum(e) for a in e]


def test_symbolic_attention_by_hand():
    source = build_symbols(ph.SymbolicAttention(dim=6, count=3, heads=2), 8, dtype=F64)
    x = torch.randn(2, 4, 8, dtype=F64)
    output, weights = source(x), source.assignments(x)
    assert output.shape == (2, 4, 6)
    assert weights.shape == (2, 4, 2, 3)
    q = x @ source.query.weight.T + source.query.bias
    for b in range(2):
        for i in range(4):
            for h in range(2):
                columns = slice(4 * h, 4 * h + 4)
                a = softmax([q[b, i, columns] @ source.templates[n, columns] / 2 for n in range(3)])
                assert_close(weights[b, i, h], torch.stack(a))
                symbol = sum(a[n] * source.library[n, 3 * h : 3 * h + 3] for n in range(3))
                assert_close(output[b, i, 3 * h : 3 * h + 3], symbol)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_relational_symbols_by_hand(causal, include_self, normalise):
    options = {"dim": 6, "neighbours": 2, "relations": 2, "include_self": include_self, "normalise": normalise}
    source = build_symbols(ph.RelationalSymbols(count=3, heads=2, **options), 8, causal=causal, dtype=F64)
    x = torch.randn(1, 5, 8, dtype=F64)
    q, k = source.q(x)[0], source.k(x)[0]
    if causal:
        steps = [0, -1, -2] if include_self else [-1, -2]
    else:
        steps = [-2, -1, 0, 1, 2] if include_self else [-2, -1, 1, 2]
    queries = []
    for i in range(5):
        near = [min(max(i + step, 0), 4) for step in steps]
        related = [[q[i, 4 * r : 4 * r + 4] @ k[j, 4 * r : 4 * r + 4] for j in near] for r in range(2)]
        if normalise:
            related = [softmax([score / 2 for score in scores]) for scores in related]
        queries.append(torch.stack([related[r][n] for n in range(len(near)) for r in range(2)]))
    queries = source.map(torch.stack(queries))[None]
    assert_close(source(x), source.symbolic(queries))
    assert_close(source.assignments(x), source.symbolic.assignments(queries))


def test_symbols_of_positions_and_offsets_are_rows_of_a_table():
    x = torch.zeros(3, 4, 8)
    position = build_symbols(ph.PositionSymbols(), 5, max_length=6)
    assert_close(position(x), position.table[None, :4], atol=0, rtol=0)
    assert_close(position(x[:, :2], first=4), position.table[None, 4:], atol=0, rtol=0)
    relative = build_symbols(ph.RelativeSymbols(), 5, max_length=6)
    assert_close(relative(x), relative.table, atol=0, rtol=0)
    assert relative.table.shape == (11, 5)
    assert build_symbols(ph.RelativeSymbols(distance=2), 5, max_length=6).table.shape == (5, 5)


def test_a_frozen_library_is_kept_but_not_trained():
    free, frozen = (build_symbols(ph.SymbolicAttention(count=3, trainable=trainable), 8) for trainable in (True, False))
    assert "library" in dict(free.named_parameters())
    assert "library" not in dict(frozen.named_parameters())
    frozen.load_state_dict(free.state_dict())
    x = torch.randn(1, 2, 8)
    assert_close(frozen(x), free(x), atol=0, rtol=0)
    assert frozen.double().library.dtype == F64
    for dim, symbol_dim, heads in ((64, 64, 4), (6, 64, 2), (64, 9, 1), (12, 20, 4)):  # by default they divide both
        assert build_symbols(ph.SymbolicAttention(dim=symbol_dim), dim).heads == heads


def relational_symbols(dim, **options):
    return build_symbols(ph.RelationalSymbols(**options), dim)


MISTAKES = {
    "SymbolicAttention: m = 8 but x (b s m) = (1, 7, 4)": lambda x: build_symbols(ph.SymbolicAttention(), 8)(x),
    "RelationalSymbols: m = 8 but x (b s m) = (1, 7, 4)": lambda x: relational_symbols(8)(x),
    "PositionSymbols: 7 positions but max_length is 6": lambda x: build_symbols(ph.PositionSymbols(), 4, max_length=6)(
        x[:, :3], first=4
    ),
    "RelativeSymbols: 7 positions but max_length is 6: give distance= to clip": lambda x: build_symbols(
        ph.RelativeSymbols(), 4, max_length=6
    )(x),
    "offsets up to 6 but max_length is 6": lambda x: ph.MultiHeadAttention(
        4, ph.Relational(2, symbols=ph.RelativeSymbols()), max_length=6
    )(x, x[:, :1]),
    "a cache needs causal=True": lambda x: relational_symbols(4)(x, cache=LayerCache()),
    "first = 2 needs the tokens before it": lambda x: relational_symbols(4, causal=True)(x, first=2),
    "relations must divide 6 but is 4": lambda x: relational_symbols(6, relations=4),
    "heads must divide 12 and 9 but is 2": lambda x: build_symbols(ph.SymbolicAttention(dim=9, heads=2), 12),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line):
    refused(lambda: MISTAKES[line](torch.zeros(1, 7, 4)), re.escape(line))
