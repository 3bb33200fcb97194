"""Parameter counts, and the width that gives two models the same size."""

import functools
import typing
from dataclasses import replace

import pytest
from refusals import refused

import polyhead as ph
from polyhead.config import Model
from polyhead.models.build import NETWORKS, build
from polyhead.models.size import match, parameters

ENDS = ph.Tokens(30), ph.Logits(30, tied=True)
PARTS = {"positions": ph.Rotary(), "feedforward": ph.Swiglu()}
DUAL = ph.TransformerConfig(*ENDS, dim=64, heads=[ph.Softmax(2), ph.Relational(2)], **PARTS)
SOFTMAX = replace(DUAL, heads=ph.Softmax(4))
IMAGES = ph.Patches((3, 8, 8), (4, 4)), ph.Classes(2)
BASELINE = ph.CoRelNetConfig(*IMAGES, dim=16)


@pytest.mark.parametrize("more", [-150, 0, 150])  # a width has 384 parameters
def test_softmax_heads_as_large_as_dual_ones(more):
    target = parameters(DUAL) + more
    assert parameters(SOFTMAX) < 0.99 * target
    matched = match(SOFTMAX, target, field="hidden")
    assert matched == replace(SOFTMAX, feedforward=matched.feedforward)
    assert ph.Transformer(matched).config == matched
    others = [replace(matched, feedforward=ph.Swiglu(matched.feedforward.hidden + step)) for step in (-1, 1)]
    assert all(abs(parameters(matched) - target) <= abs(parameters(other) - target) for other in others)


@pytest.mark.parametrize("target", [30_000, 31_000, 300_000])
def test_a_model_that_is_no_transformer_has_the_nearest_width(target):
    matched = match(BASELINE, target, field="dim", tolerance=0.2)
    others = [replace(BASELINE, dim=matched.dim + step) for step in (-1, 1)]
    assert all(abs(parameters(matched) - target) <= abs(parameters(other) - target) for other in others)


def test_an_encoder_grows_with_its_decoder():
    model = replace(SOFTMAX, causal=True, encoder=replace(SOFTMAX, outputs=ph.Logits(30)))
    target = parameters(DUAL) + parameters(SOFTMAX)
    matched = match(model, target, field="hidden")
    assert matched.feedforward == matched.encoder.feedforward
    assert abs(parameters(matched) / target - 1) < 0.01


def test_mistakes_are_one_line(monkeypatch):
    for model, target, field, message in (
        (BASELINE, 10, "dim", "no dim gives 10 parameters within 1.0%: dim 1 has"),
        (SOFTMAX, 10, "hidden", "no hidden gives 10 parameters within 1.0%: hidden 1 has"),
        (SOFTMAX, 10, "layers", "field must be \"hidden\" but is 'layers'"),
        (BASELINE, 20_000, "softmax", "CoRelNetConfig has no integer 'softmax'"),
    ):
        refused(functools.partial(match, model, target, field=field), f"^match: {message}")
    assert set(NETWORKS) <= set(typing.get_args(Model))
    monkeypatch.delitem(NETWORKS, ph.TransformerConfig)
    refused(lambda: build(DUAL), r"build: the settings must be of a model (.*), got a TransformerConfig")
