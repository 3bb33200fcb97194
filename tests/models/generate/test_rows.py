"""Tokens for many prompts equal those of single prompts, of decoding without a cache, and of the logits."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from refusals import refused
from zoo import make_model as make

import polyhead as ph
from polyhead.layers.cache import Cache
from polyhead.models.generate.sampling import SamplingOptions, row_draws
from polyhead.models.generate.tokens import generate, stream

BASE = ph.TransformerConfig(
    ph.Tokens(12), ph.Logits(12), dim=16, layers=1, heads=ph.Softmax(4), max_length=24, causal=True
)
ENCODER = replace(BASE, inputs=ph.Tokens(7), causal=False, positions=ph.Sinusoidal())
DUAL = replace(
    BASE,
    heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols(count=5))],
    cross_heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=5))],
    encoder=replace(ENCODER, heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())]),
)
VARIANTS = zoo.models(zoo.FEW, layers=1) | {
    "encoder": replace(BASE, encoder=ENCODER, positions=ph.Rotary(), outputs=ph.Logits(12, tied=True)),
    "dual encoder": DUAL,
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
SAMPLED = {"temperature": 1.3, "top_k": 9, "top_p": 0.95}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def source_of(model, rows=(0, 1, 2)):
    """What an encoder reads, for these of three prompts; the middle one is shorter."""
    if model.encoder is None:
        return {}
    source, mask = torch.arange(15).view(3, 5) * 2 % 7, torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return {"source": source[[*rows]], "source_mask": mask[[*rows]]}


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_tokens_depend_neither_on_the_cache_nor_on_other_rows(name):
    model = make(VARIANTS[name])
    source = source_of(model)
    likeliest = generate(model, PROMPTS, steps=6, temperature=0.0, **source)
    assert likeliest == generate(model, PROMPTS, steps=6, temperature=0.0, use_cache=False, **source)
    sequence = torch.tensor([PROMPTS[2] + likeliest[2]])
    assert model(sequence, **source_of(model, [2]))[0, 2:-1].argmax(-1).tolist() == likeliest[2]
    sampled = generate(model, PROMPTS, steps=6, generator=seeded(), **SAMPLED, **source)
    assert sampled == generate(model, PROMPTS, steps=6, generator=seeded(), use_cache=False, **SAMPLED, **source)
    others = [PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    assert sampled[1:] == generate(model, others, steps=6, generator=seeded(), **SAMPLED, **source)[1:]
    assert [len(row) for row in sampled] == [6, 6, 6]
    assert len({token for row in sampled for token in row}) > 3


@torch.no_grad()
def test_tokens_are_drawn_from_the_logits_of_all_before():
    model = make(replace(BASE, heads=ph.Softmax(4, kv_heads=2), positions=ph.Rotary(), qk_norm=True))
    sampled = generate(model, PROMPTS, steps=6, generator=seeded(4), **SAMPLED)
    draws, choice = row_draws(3, 6, seeded(4)), SamplingOptions(**SAMPLED)
    for row, prompt, uniforms in zip(sampled, PROMPTS, draws, strict=True):
        for i in range(6):
            logits = model(torch.tensor([prompt + row[:i]]))[:, -1]
            assert choice(logits, uniforms[i : i + 1]).tolist() == row[i : i + 1]


def test_seeds_decide_and_fewer_steps_are_a_beginning():
    model = make(BASE)
    first = generate(model, PROMPTS, steps=6, generator=seeded(1))
    assert first == generate(model, PROMPTS, steps=6, generator=seeded(1))
    assert first != generate(model, PROMPTS, steps=6, generator=seeded(2))
    assert [row[:3] for row in first] == generate(model, PROMPTS, steps=3, generator=seeded(1))
    assert len({*map(tuple, generate(model, torch.tensor([[1]] * 3), steps=6, generator=seeded(1)))}) == 3
    state = torch.get_rng_state()
    generate(model, PROMPTS, steps=2, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("settings", [BASE, DUAL], ids=["decoder", "encoder"])
def test_rows_stop_for_themselves_and_all_together(settings):
    model = make(settings)
    source = source_of(model)
    free = generate(model, PROMPTS, steps=12, generator=seeded(), **source)
    stops = (free[0][3], free[2][6])
    expected = [list(itertools.takewhile(lambda token: token not in stops, row)) for row in free]
    assert len({len(row) for row in expected}) > 1
    for use_cache in (True, False):
        options = {"generator": seeded(), "stop": stops, "use_cache": use_cache}
        assert generate(model, PROMPTS, steps=12, **options, **source) == expected
    steps = list(stream(model, PROMPTS, steps=12, generator=seeded(), stop=stops, **source))
    assert len(steps) == min(max(len(row) for row in expected) + 1, 12)
    for i, row in enumerate(expected):
        assert [step[i] for step in steps] == row + [None] * (len(steps) - len(row))
    for first in (free[0][0], np.int64(free[0][0])):
        options = {"generator": seeded(), "stop": first, **source_of(model, [0])}
        assert generate(model, PROMPTS[:1], steps=12, **options) == [[]]


def test_a_cached_step_reads_its_own_token_only():
    model = make(DUAL)
    decoded, encoded = [], []
    model.blocks[0].attention.register_forward_pre_hook(lambda module, args: decoded.append(args[0].shape[1]))
    model.encoder.register_forward_pre_hook(lambda module, args: encoded.append(args[0].shape[1]))
    generate(model, PROMPTS, steps=4, **source_of(model))
    assert (decoded, encoded) == ([7, 1, 1, 1], [5])


@pytest.mark.parametrize(
    "changes",
    [
        *({"positions": positions} for positions in (ph.Rotary(), ph.Learned(), ph.Sinusoidal())),
        *({"heads": ph.Relational(4, symbols=source)} for source in (ph.PositionSymbols(), ph.RelativeSymbols())),
    ],
)
def test_the_longest_context_is_max_length(changes):
    """A model of max_length 24 reads 24 tokens and says one more."""
    model = make(replace(BASE, **changes))
    assert len(generate(model, [[1] * 20], steps=5)[0]) == 5
    for prompt, steps, fit in ((20, 6, 5), (25, 1, 0)):
        call = functools.partial(generate, model, [[1], [1] * prompt], steps=steps)
        refused(call, rf"\(max_length\): after {prompt} tokens at most {fit} steps fit, but steps is {steps}$")


def test_mistakes_are_one_line_before_the_first_step():
    model, both = make(BASE), make(VARIANTS["encoder"])
    vectors, wide, two_ways = ({"inputs": ph.Vectors(3)}, {"outputs": ph.Logits(13)}, {"causal": False})
    for call, message in (
        (lambda: stream(model, [], steps=1), "there must be at least one prompt"),
        (lambda: stream(model, [[1], []], steps=1), "each prompt must have at least one token"),
        (lambda: stream(model, [[1.9]], steps=1), "prompts must be lists of whole numbers"),
        (lambda: stream(model, [[1, 12]], steps=1), "tokens must be 0 to 11, got 12"),
        (lambda: stream(model, [[1]], steps=1, top_p=2.0), "top_p must be above 0"),
        (lambda: stream(model, [[1]], steps=1, stop="a"), "stop must be tokens, got 'a'; for texts there is generate"),
        (lambda: stream(model.blocks[0], [[1]], steps=1), "the model must be a Transformer, got TransformerBlock"),
        (lambda: stream(model, [[1]], steps=2.0), "steps must be an integer of at least 1 but is 2.0"),
        (lambda: stream(both, [[1]], steps=1), "the model has an encoder, so it wants a source"),
        (lambda: stream(make(replace(BASE, **two_ways)), [[1]], steps=1), "the model must be causal between Tokens"),
        (lambda: stream(make(replace(BASE, **vectors)), [[1]], steps=1), "the model must be causal between Tokens"),
        (lambda: stream(make(replace(BASE, **wide)), [[1]], steps=1), "the model knows 12 tokens but gives"),
    ):
        refused(call, f"^generate: {message}")
    refused(lambda: stream(model, [[1]], steps=1, source=torch.zeros(1, 1).long()), "it has no encoder")
    for settings, layers in ((BASE, 3), (replace(BASE, **two_ways), 1)):
        message = f"a cache of 1 layers and causal=True go together, got {layers} layers and causal={settings.causal}"
        refused(functools.partial(make(settings), torch.zeros(1, 1).long(), cache=Cache(layers)), message)
