"""Tokens for many prompts equal those of single prompts, of decoding without a cache, and of the logits."""

import functools
from dataclasses import replace

import pytest
import torch
import zoo
from refusals import refused
from zoo import make_model as make

import polyhead as ph
from polyhead.models.generate.sampling import SamplingOptions, row_draws
from polyhead.models.generate.tokens import generate, greedy, stream

BASE = ph.TransformerConfig(
    ph.Tokens(12), ph.Logits(12), dim=16, layers=1, heads=ph.Softmax(4), max_length=24, causal=True
)
VARIANTS = zoo.models(zoo.FEW, layers=1)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
SAMPLED = {"temperature": 1.3, "top_k": 9, "top_p": 0.95}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_depend_neither_on_the_cache_nor_on_other_rows(name):
    model = make(VARIANTS[name])
    likeliest = generate(model, PROMPTS, steps=6, temperature=0.0)
    assert likeliest == generate(model, PROMPTS, steps=6, temperature=0.0, use_cache=False)
    assert likeliest[2] == greedy(model, torch.tensor(PROMPTS[2:]), steps=6)[0, 3:].tolist()
    said = generate(model, PROMPTS, steps=6, generator=seeded(), **SAMPLED)
    assert said == generate(model, PROMPTS, steps=6, generator=seeded(), use_cache=False, **SAMPLED)
    others = [PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    assert said[1:] == generate(model, others, steps=6, generator=seeded(), **SAMPLED)[1:]
    assert [len(row) for row in said] == [6, 6, 6]
    assert len({token for row in said for token in row}) > 3


@torch.no_grad()
def test_tokens_are_drawn_from_the_logits_of_all_before():
    model = make(replace(BASE, heads=ph.Softmax(4, kv_heads=2), positions=ph.Rotary(), qk_norm=True))
    said = generate(model, PROMPTS, steps=6, generator=seeded(4), **SAMPLED)
    draws, choice = row_draws(3, 6, seeded(4)), SamplingOptions(**SAMPLED)
    for row, prompt, own in zip(said, PROMPTS, draws, strict=True):
        for i in range(6):
            logits = model(torch.tensor([prompt + row[:i]]))[:, -1]
            assert choice(logits, own[i : i + 1]).tolist() == row[i : i + 1]


def test_seeds_decide_and_fewer_steps_are_a_beginning():
    model = make(BASE)
    first = generate(model, PROMPTS, steps=6, generator=seeded(1))
    assert first == generate(model, PROMPTS, steps=6, generator=seeded(1))
    assert first != generate(model, PROMPTS, steps=6, generator=seeded(2))
    assert [row[:3] for row in first] == generate(model, PROMPTS, steps=3, generator=seeded(1))
    same = generate(model, torch.tensor([[1]] * 3), steps=6, generator=seeded(1))
    assert same == generate(model, [[1]] * 3, steps=6, generator=seeded(1))
    assert len({tuple(row) for row in same}) == 3
    torch.manual_seed(3)
    state = torch.get_rng_state()
    generate(model, PROMPTS, steps=2, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_stop_for_themselves_and_all_together():
    model = make(BASE)
    free = generate(model, PROMPTS, steps=12, generator=seeded())
    stops = (free[0][3], free[2][6])
    wanted = [row[: min((i for i, token in enumerate(row) if token in stops), default=12)] for row in free]
    assert len({len(row) for row in wanted}) > 1
    for use_cache in (True, False):
        assert generate(model, PROMPTS, steps=12, generator=seeded(), stop=stops, use_cache=use_cache) == wanted
    steps = list(stream(model, PROMPTS, steps=12, generator=seeded(), stop=stops))
    assert len(steps) == min(max(len(row) for row in wanted) + 1, 12)
    for i, row in enumerate(wanted):
        assert [said[i] for said in steps] == row + [None] * (len(steps) - len(row))
    assert generate(model, PROMPTS[:1], steps=12, generator=seeded(), stop=free[0][0]) == [[]]


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
    prompts = [(25, 1, "a prompt of at most 24 tokens"), (25, 6, "a prompt of at most 19 tokens")]
    for prompt, steps, advice in [(20, 6, "at most 5 steps"), *prompts]:
        call = functools.partial(generate, model, [[1], [1] * prompt], steps=steps)
        refused(call, rf"{prompt} tokens and {steps} steps .* of 24 \(max_length\): give {advice}")


def test_mistakes_are_one_line_before_the_first_step():
    model = make(BASE)
    both = make(replace(BASE, encoder=replace(BASE, causal=False)))
    for call, text in (
        (lambda: stream(model, [], steps=1), "no prompt came: each needs at least one token"),
        (lambda: stream(model, [[1], []], steps=1), "an empty prompt came"),
        (lambda: stream(model, [[1, 12]], steps=1), "tokens must be 0 to 11 but 12 came"),
        (lambda: stream(model, [[1]], steps=1, top_p=2.0), "top_p must be above 0"),
        (lambda: stream(both, [[1]], steps=1), "the model has an encoder, so it wants a source: use greedy"),
        (lambda: stream(make(replace(BASE, causal=False)), [[1]], steps=1), "a causal model between Tokens"),
    ):
        refused(call, f"^generate: {text}")
