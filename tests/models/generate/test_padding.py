"""Left-padded rows of several lengths get the logits of each row alone: in one pass, and step by step.  A layer with a
window stores only keys that later tokens can see, and decoding is still exact."""

from dataclasses import replace

import pytest
import torch
import zoo
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import Cache

MIXTURE = [ph.Softmax(1), ph.Hyla(1), ph.Relational(1, symbols=ph.PositionSymbols()), ph.Linear(1, dim=4)]
MODELS = zoo.models({"mixture": MIXTURE} | zoo.MIXTURES, max_length=16)
LENGTHS = (9, 1, 4)


def make(name, **options):
    return zoo.make_model(replace(MODELS[name], **options))


def padded(lengths=LENGTHS):
    """Tokens, of which some are padding; which are real; the position of each among the real ones of its row."""
    x = torch.randint(12, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return x, real, (real.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def compare(model, logits, x, real):
    for row, tokens, here in zip(logits, x, real, strict=True):
        assert_close(row[here], model(tokens[here][None])[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("heads", "encoding"), zoo.turns([*MODELS], [*zoo.POSITIONS])[::3])
@torch.no_grad()
def test_padded_rows_equal_single_ones(heads, encoding):
    model = make(heads, positions=zoo.POSITIONS[encoding])
    x, real, positions = padded()
    logits = model(x, mask=real, positions=positions)
    compare(model, logits, x, real)
    assert_close(model(x, mask=real, positions=positions, tail=2), logits[:, -2:])
    cache, parts = Cache(2), []
    for first, last in ((0, 2), (2, 6), (6, 7), (7, 9)):  # the row of one token is padding in three of these
        here = slice(first, last)
        mask = None if real[:, here].all() else real[:, here]
        parts.append(model(x[:, here], mask=mask, positions=positions[:, here], cache=cache))
    compare(model, torch.cat(parts, 1), x, real)


WINDOWS = zoo.models(zoo.FEW, max_length=40)
ENDS = ph.Tokens(12), ph.Logits(12)


@pytest.mark.parametrize(("name", "window"), zoo.turns([*zoo.FEW], (1, 4)))
@torch.no_grad()
def test_decoding_is_exact_and_its_memory_bounded(name, window):
    model, x = zoo.make_model(replace(WINDOWS[name], window=window)), torch.randint(12, (2, 24))
    expected, cache, parts, sizes = model(x), Cache(2), [], []
    for first, last in ((0, 9), *((i, i + 1) for i in range(9, 20)), (20, 24)):
        parts.append(model(x[:, first:last], cache=cache))
        sizes.append(cache.nbytes)
        assert cache.length == last
    assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=1e-10)
    assert len(set(sizes)) == 1
    stored = {cache[0].length - cache[0].gone, cache[1].length - cache[1].gone}
    assert stored == {window - 1}
