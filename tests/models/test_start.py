"""The loss of an untrained language model is close to ln(tokens), for every preset, size and pair of ends."""

import math

import pytest
import torch

import polyhead as ph

V = 256
ENDS = {
    "untied": (ph.Tokens(V), ph.Logits(V)),
    "tied": (ph.Tokens(V), ph.Logits(V, tied=True)),
    "untied, scaled in": (ph.Tokens(V, scaled=True), ph.Logits(V)),
    "tied, scaled in": (ph.Tokens(V, scaled=True), ph.Logits(V, tied=True)),
    "tied, scaled out": (ph.Tokens(V), ph.Logits(V, tied=True, scaled=True)),
    "tied, scaled both": (ph.Tokens(V, scaled=True), ph.Logits(V, tied=True, scaled=True)),
}


def settings(ends, dim=64, layers=2, preset="cs336", **options):
    how = {"feedforward": ph.Swiglu(64), "positions": ph.Rotary(), "causal": True, "init": preset, **options}
    return ph.TransformerConfig(*ENDS[ends], dim=dim, layers=layers, heads=ph.Softmax(8), **how)


def start(config):
    """The mean loss over all tokens that may follow."""
    torch.manual_seed(0)
    with torch.no_grad():
        logits = ph.Transformer(config)(torch.randint(V, (2, 16)))
    return (logits.logsumexp(-1) - logits.mean(-1)).mean().item()


@pytest.mark.parametrize(
    ("size", "ends", "preset"),
    [
        ((64, 2), "untied", "hyla"),
        ((64, 2), "tied, scaled both", "cs336"),
        ((64, 12), "tied, scaled out", "cs336"),
        ((512, 2), "tied, scaled in", "hyla"),
    ],
    ids=str,
)
def test_the_loss_begins_near_that_of_knowing_nothing(size, ends, preset):
    assert start(settings(ends, *size, preset)) == pytest.approx(math.log(V), rel=0.05)
