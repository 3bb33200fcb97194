"""Packed sequences, windows and ragged prompts through the whole transformer: each token gets what it gets alone."""

from dataclasses import replace

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import config
from polyhead.config import (
    Abstractor,
    Alibi,
    Classes,
    Disentangled,
    Experts,
    Hyla,
    Learned,
    Linear,
    Logits,
    PositionSymbols,
    Relational,
    RelationalSymbols,
    RelativeBias,
    RelativeSymbols,
    Rotary,
    Sinusoidal,
    Softmax,
    SymbolicAttention,
    Tokens,
    TransformerConfig,
    Vectors,
)
from polyhead.layers.cache import Cache
from polyhead.models.transformer import Transformer

BASE = TransformerConfig(
    Vectors(5), Logits(7), dim=24, layers=2, heads=[Softmax(2), Hyla(2)], max_length=8, positions=Rotary()
)
VARIANTS = {
    "learned": replace(BASE, positions=Learned(), heads=[[Linear(4)], [Hyla(2, value_depth=2), Softmax(2)]]),
    "sinusoidal": replace(BASE, positions=Sinusoidal(), norm_order="post", feedforward=Experts(3, 2, hidden=8)),
    "t5": replace(BASE, positions=RelativeBias(8), causal=True, window=2),
    "alibi": replace(BASE, positions=Alibi(), causal=True, heads=[Linear(2), Softmax(2)]),
    "symbols": replace(
        BASE,
        causal=True,
        window=3,
        heads=[
            [Softmax(2), Relational(2, symbols=SymbolicAttention(count=5, shared=False))],
            [Relational(2, symbols=PositionSymbols()), Abstractor(2, act="tanh", symbols=RelativeSymbols())],
        ],
    ),
    "neighbours": replace(
        BASE,
        heads=[
            Disentangled(2, symbols=RelationalSymbols(count=5, once=True)),
            Relational(2, symbols=RelationalSymbols(count=5, shared=False, neighbours=3)),
        ],
    ),
}
LENGTHS = (4, 1, 7, 3)
CU = torch.tensor([0, 4, 5, 12, 15], dtype=torch.int32)


def build(settings):
    torch.manual_seed(0)
    model = Transformer(settings, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model.eval()


def gradients(y, towards, leaves):
    grads = torch.autograd.grad((y * towards).sum(), leaves, allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in grads]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_sequences_are_what_they_are_alone(name, masked):
    """Outputs and gradients; with padding at the edges of sequences, which nobody looks at."""
    model = build(VARIANTS[name])
    x, mask = torch.randn(1, 15, 5, dtype=torch.float64, requires_grad=True), torch.ones(1, 15, dtype=torch.bool)
    mask[0, [3, 5, 6, 11, 12]] = not masked
    parts = zip(x.split(LENGTHS, 1), mask.split(LENGTHS, 1), strict=True)
    alone = torch.cat([model(part, mask=own if masked else None) for part, own in parts], 1)[mask]
    together = model(x, mask=mask if masked else None, cu_seqlens=CU)[mask]
    assert_close(together, alone, atol=1e-9, rtol=1e-9)
    towards, leaves = torch.randn_like(alone), [x, *model.parameters()]
    for a, b in zip(gradients(together, towards, leaves), gradients(alone, towards, leaves), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_taps_of_packed_sequences_show_what_each_shows_alone():
    model, x = build(VARIANTS["neighbours"]), torch.randn(1, 15, 5, dtype=torch.float64)
    taps, alone = [], []
    model(x, cu_seqlens=CU, taps=taps)
    model(x[:, 5:12], taps=alone)
    for layer, own in some(zip(taps, alone, strict=True)):
        for group, wanted in some(zip(layer.groups, own.groups, strict=True)):
            assert_close(group.assignments[:, 5:12], wanted.assignments)
            assert_close(group.code()[..., 5:12, 5:12], wanted.code())


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_the_model_hides_distant_tokens(causal):
    """Over two layers a token hears of those up to 2 (window - 1) positions away; the digest has it only where it is
    set."""
    settings = replace(BASE, window=2, causal=causal)
    model, x = build(settings), torch.randn(1, 7, 5, dtype=torch.float64, requires_grad=True)
    (heard,) = torch.autograd.grad(model(x)[0, 3].sum(), x)
    near = [abs(i - 3) <= 2 and (i <= 3 or not causal) for i in range(7)]
    assert heard[0].ne(0).any(-1).tolist() == near
    assert_close(model(x, tail=2), model(x)[:, -2:])
    assert config.digest(replace(BASE, window=None)) == config.digest(BASE) != config.digest(settings)
    with pytest.raises(ValueError, match="TransformerConfig: window must be at least 1 but is 0"):
        replace(BASE, window=0)


CACHED = {
    "softmax": BASE,
    "window": replace(BASE, window=3, heads=[Linear(2), Hyla(2)], positions=Alibi()),
    "sums": replace(BASE, heads=[Linear(2), Linear(2, act="relu", kv_heads=1)]),
    "learned": replace(BASE, positions=Learned(), heads=[Linear(2), Softmax(2)]),
    "dual": replace(
        BASE, heads=[Softmax(2), Relational(1, symbols=SymbolicAttention()), Relational(1, symbols=PositionSymbols())]
    ),
}


@pytest.mark.parametrize("given", ["all", "prompt", "none", "positions"])
@pytest.mark.parametrize("name", CACHED)
def test_ragged_prompts_go_through_a_cache(name, given):
    """Padding left and right of prompts, told with each call or with the prompt only; positions go on as they do
    without a cache, or are given so that each sequence counts its own tokens."""
    settings = replace(CACHED[name], causal=True, inputs=Tokens(11), max_length=12)
    model, x, mask = build(settings), torch.randint(11, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    if given != "none":
        mask[0, :2] = mask[1, 3:5] = False
    where = (mask.cumsum(1) - 1).clamp(min=0) if given == "positions" else None
    whole, cache, pieces = model(x, mask=mask, positions=where), Cache(2), []
    for a, b in ((0, 5), (5, 6), (6, 8), (8, 9)):
        told = mask[:, a:b] if given in ("all", "positions") or (given == "prompt" and a == 0) else None
        own = None if where is None else where[:, a:b]
        pieces.append(model(x[:, a:b], mask=told, positions=own, cache=cache))
    assert_close(torch.cat(pieces, 1), whole, atol=1e-9, rtol=1e-9)
    if given == "positions" and name in ("softmax", "sums", "learned"):
        assert_close(whole[0, 2:], model(x[:1, 2:])[0], atol=1e-9, rtol=1e-9)


def test_memory_of_sums_does_not_grow():
    model, cache, sizes = build(replace(CACHED["sums"], causal=True, max_length=64)), Cache(2), []
    x = torch.randn(2, 40, 5, dtype=torch.float64)
    for a, b in ((0, 4), (4, 5), (5, 40)):
        model(x[:, a:b], cache=cache)
        sizes.append(cache.nbytes)
    assert cache.length == 40
    assert len(set(sizes)) == 1


def test_mistakes_are_one_line():
    x = torch.randn(1, 15, 5, dtype=torch.float64)
    reads = replace(BASE, causal=True, encoder=BASE)
    model = build(replace(BASE, causal=True))
    several = "with cu_seqlens inputs are several sequences, without"
    for call, text in (
        (lambda: model(x, cu_seqlens=CU, tail=1), f"{several} tail"),
        (lambda: model(x, cu_seqlens=CU, cache=Cache(2)), f"{several} cache"),
        (lambda: build(reads)(x, cu_seqlens=CU, source=x), f"{several} encoder"),
        (lambda: build(replace(BASE, outputs=Classes(2)))(x, cu_seqlens=CU), rf"{several} Classes\(\)"),
        (lambda: model(x.expand(2, -1, -1), cu_seqlens=CU), r"x \(1 t m\) .* but x \(b t m\) = \(2, 15, 24\)"),
        (lambda: build(replace(BASE, positions=Learned(), max_length=6))(x, cu_seqlens=CU), "below max_length = 6"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            call()
        assert "\n" not in str(error.value)
