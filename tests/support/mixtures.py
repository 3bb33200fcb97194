"""Random models: one or two layers with a mixture of heads, far from their initial parameters."""

import warnings

import torch

import polyhead as ph
from polyhead.spec import ACTS, NORMALISE

VOCABULARY = 11


def draw_model(dice, causal):
    """The configuration of a model of one or two layers with a random mixture of heads."""
    groups = []
    for _ in range(dice.choice((1, 2, 3))):
        kinds = ph.Softmax, ph.Linear, ph.Hyla, ph.Relational, ph.Disentangled, ph.Abstractor, ph.Pooled
        kind, heads = dice.choice(kinds), dice.choice((1, 2, 4))
        more = {"normalise": dice.choice(NORMALISE), "act": dice.choice(ACTS)} if kind in (ph.Linear, ph.Hyla) else {}
        groups.append(kind(heads, dim=dice.choice((2, 4, 6)), value_dim=dice.choice((1, 3, 5)), **more))
    positions = dice.choice((None, ph.Rotary(), ph.Alibi(), ph.Learned(), ph.Sinusoidal(), ph.RelativeBias(8, 16)))
    if isinstance(positions, ph.RelativeBias) and not causal:
        positions = ph.RelativeBias(8, 16, bidirectional=True)
    return ph.TransformerConfig(
        ph.Tokens(VOCABULARY), ph.Logits(VOCABULARY), dim=24, layers=dice.choice((1, 2)), heads=groups, max_length=48,
        causal=causal, positions=positions, window=dice.choice((None, None, 2, 7)), norm=dice.choice(("layer", "rms")),
    )  # fmt: skip


def build(settings, seed):
    """A model far from its initial parameters, where attention is nearly uniform."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are blind to the order of their tokens
        model = ph.Transformer(settings, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model
