"""The loss of an untrained language model is close to ln(tokens), for every preset, size and pair of ends."""

import math

import pytest
import torch

import polyhead as ph

V = 256


def initial_loss(ends, dim, layers, preset):
    """The mean loss over all tokens that may follow."""
    torch.manual_seed(0)
    options = {"feedforward": ph.Swiglu(64), "positions": ph.Rotary(), "causal": True, "init": preset}
    config = ph.TransformerConfig(*ends, dim=dim, layers=layers, heads=ph.Softmax(8), **options)
    with torch.no_grad():
        logits = ph.Transformer(config)(torch.randint(V, (2, 16)))
    return (logits.logsumexp(-1) - logits.mean(-1)).mean().item()


@pytest.mark.parametrize(
    ("size", "ends", "preset"),
    [
        ((64, 2), (ph.Tokens(V), ph.Logits(V)), "hyla"),
        ((64, 2), (ph.Tokens(V, scaled=True), ph.Logits(V, tied=True, scaled=True)), "cs336"),
        ((64, 12), (ph.Tokens(V), ph.Logits(V, tied=True, scaled=True)), "cs336"),
        ((512, 2), (ph.Tokens(V, scaled=True), ph.Logits(V, tied=True)), "hyla"),
    ],
    ids=str,
)
def test_the_loss_begins_near_that_of_knowing_nothing(size, ends, preset):
    assert initial_loss(ends, *size, preset) == pytest.approx(math.log(V), rel=0.05)
