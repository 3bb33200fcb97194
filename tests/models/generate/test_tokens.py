"""Greedy decoding equals the model's own outputs, with and without a cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused

import polyhead as ph
from polyhead.layers.cache import Cache
from polyhead.models.generate.tokens import greedy, stops_of

BASE = ph.TransformerConfig(
    ph.Tokens(12), ph.Logits(12), dim=16, layers=2, heads=[ph.Softmax(2), ph.Hyla(2)], max_length=16, causal=True
)
READS = replace(BASE, inputs=ph.Tokens(7), causal=False, positions=ph.Sinusoidal(), layers=1)
VARIANTS = {
    "dual": replace(BASE, positions=ph.Sinusoidal(), heads=[ph.Softmax(2), ph.Relational(2)]),
    "encoder": replace(BASE, encoder=READS, positions=ph.Rotary(), outputs=ph.Logits(12, tied=True)),
    "dual encoder": replace(
        BASE,
        heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols(count=5))],
        cross_heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=5))],
        encoder=replace(READS, heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())]),
    ),
}
"""Models of every kind of heads are in ../test_packed.py and test_rows.py."""


def make(name):
    """A model whose likeliest tokens vary, its first tokens, and the arguments of its encoder."""
    torch.manual_seed(0)
    model = ph.Transformer(VARIANTS[name], dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():  # without a bias, which would make one token the likeliest everywhere
            p.add_(torch.randn_like(p), alpha=0.5 if p.ndim > 1 else 0.0)
    start = torch.randint(12, (3, 2))
    if VARIANTS[name].encoder is None:
        return model, start, {}
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return model, start, {"source": torch.randint(7, (3, 5)), "source_mask": mask}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_takes_the_likeliest_token_cached_or_not(name):
    model, start, given = make(name)
    said = greedy(model, start, steps=9, **given)
    assert torch.equal(said, greedy(model, start, steps=9, use_cache=False, **given))
    assert said.shape == (3, 11)
    assert torch.equal(said[:, :2], start)
    model.eval()
    assert torch.equal(model(said, **given)[:, 1:-1].argmax(-1), said[:, 2:])
    assert len(said[:, 2:].unique()) > 1


def test_each_sequence_stops_for_itself_and_all_together():
    model, start, given = make("dual encoder")
    free = greedy(model, start, steps=9, **given)[:, 2:]
    stop = free[0, 2].item()
    at = [row.tolist().index(stop) if stop in row else 9 for row in free]
    assert len(set(at)) > 1
    for use_cache in (True, False):
        said = greedy(model, start, steps=9, stop=stop, use_cache=use_cache, **given)[:, 2:]
        assert said.shape[1] == min(max(at) + 1, 9)
        for row, whole, end in zip(said, free, at, strict=True):
            assert torch.equal(row[: end + 1], whole[: said.shape[1]][: end + 1])
            assert (row[end:] == stop).all()
    alone = greedy(model, start[:1], steps=9, stop=stop, source=given["source"][:1])
    assert alone.shape == (1, 2 + at[0] + 1)


def test_a_cached_step_reads_its_own_token_only():
    model, start, given = make("dual encoder")
    seen, encoded = [], []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    model.encoder.register_forward_pre_hook(lambda module, args: encoded.append(args[0].shape[1]))
    greedy(model, start, steps=4, **given)
    assert seen == [2, 2, 1, 1, 1, 1, 1, 1]
    assert encoded == [5]


def test_mistakes_are_one_line():
    model, start, _ = make("dual")
    both, wide = make("encoder")[0], ph.Transformer(replace(BASE, outputs=ph.Logits(13)))
    seeing, vectors = (ph.Transformer(replace(BASE, **it)) for it in ({"causal": False}, {"inputs": ph.Vectors(3)}))
    for call, text in (
        (lambda: greedy(model, start, steps=0), "greedy: steps must be at least 1 but is 0"),
        (lambda: greedy(seeing, start, steps=1), "a causal model between Tokens"),
        (lambda: greedy(vectors, start, steps=1), "a causal model between Tokens"),
        (lambda: greedy(wide, start, steps=1), "knows 12 tokens but gives"),
        (lambda: greedy(both, start, steps=1), "its encoder reads a source"),
        (lambda: greedy(model, start, steps=1, source=start), "it has no encoder"),
        (lambda: greedy(model, start, steps=16), "2 tokens and 16 steps more go beyond .* context of 16"),
        (lambda: model(start, cache=Cache(3)), "a cache of 2 layers and causal=True go together but 3 layers"),
        (lambda: seeing(start, cache=Cache(2)), "2 layers and causal=False came"),
    ):
        refused(call, text)


def test_a_stop_may_come_from_an_array_and_anything_else_is_one_line():
    for stop, wanted in (
        (None, ()), (3, (3,)), (np.int64(3), (3,)), (torch.tensor(3), (3,)), ((3, 4), (3, 4)),
        (np.array([3, 4]), (3, 4)), (torch.tensor([3]), (3,)), ({4}, (4,)),
    ):  # fmt: skip
        assert stops_of("generate", stop) == wanted
    for wrong in ("a", 1.5, [3, None]):
        refused(
            lambda wrong=wrong: stops_of("greedy", wrong), "greedy: stop must be a token or a list of tokens but is"
        )
