"""Packed sequences, windows and ragged prompts in the whole transformer: each token gets its result as if alone."""

from dataclasses import replace

import pytest
import torch
import zoo
from gradients import same_with_gradients
from refusals import refused
from torch.testing import assert_close
from zoo import make_model as build

import polyhead as ph
from polyhead import config
from polyhead.layers.cache import Cache

BASE = ph.TransformerConfig(
    ph.Vectors(5), ph.Logits(7), dim=24, heads=[ph.Softmax(2), ph.Hyla(2)], max_length=8, positions=ph.Rotary()
)
MODELS = zoo.models(zoo.MIXTURES, inputs=ph.Vectors(5), outputs=ph.Logits(7), max_length=8)
LENGTHS = (4, 1, 7, 3)
CU = torch.tensor([0, 4, 5, 12, 15], dtype=torch.int32)


@pytest.mark.parametrize(("name", "masked"), zoo.turns([*MODELS], (False, True))[::3])
def test_packed_sequences_equal_single_ones(name, masked):
    """Outputs and gradients; with padding at the edges of sequences, which is masked."""
    model = build(replace(MODELS[name], causal=masked))
    x, mask = torch.randn(1, 15, 5, dtype=torch.float64, requires_grad=True), torch.ones(1, 15, dtype=torch.bool)
    mask[0, [3, 5, 6, 11, 12]] = not masked
    parts = zip(x.split(LENGTHS, 1), mask.split(LENGTHS, 1), strict=True)
    separate = torch.cat([model(part, mask=part_mask if masked else None) for part, part_mask in parts], 1)[mask]
    packed = model(x, mask=mask if masked else None, cu_seqlens=CU)[mask]
    same_with_gradients(packed, separate, [x, *model.parameters()])


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_the_model_hides_distant_tokens(causal):
    """Over two layers a token hears of those up to 2 (window - 1) positions away; the digest has it only if set."""
    settings = replace(BASE, window=2, causal=causal)
    model, x = build(settings), torch.randn(1, 7, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[0, 3].sum(), x)
    is_near = [abs(i - 3) <= 2 and (i <= 3 or not causal) for i in range(7)]
    assert gradient[0].ne(0).any(-1).tolist() == is_near
    assert_close(model(x, tail=2), model(x)[:, -2:])
    assert config.digest(replace(BASE, window=None)) == config.digest(BASE) != config.digest(settings)
    refused(lambda: replace(BASE, window=0), "TransformerConfig: window must be int >= 1 but is 0")


def test_mistakes_are_one_line():
    x = torch.randn(1, 15, 5, dtype=torch.float64)
    encoder_decoder = replace(BASE, causal=True, encoder=BASE)
    model = build(replace(BASE, causal=True))
    several = "with cu_seqlens inputs are several sequences, without"
    for call, message in (
        (lambda: model(x, cu_seqlens=CU, tail=1), f"{several} tail"),
        (lambda: model(x, cu_seqlens=CU, cache=Cache(2)), f"{several} cache"),
        (lambda: build(encoder_decoder)(x, cu_seqlens=CU, source=x), f"{several} encoder"),
        (lambda: build(replace(BASE, outputs=ph.Classes(2)))(x, cu_seqlens=CU), rf"{several} Classes\(\)"),
        (lambda: build(replace(BASE, positions=ph.Learned(), max_length=6))(x, cu_seqlens=CU), "below max_length = 6"),
    ):
        refused(call, message)
