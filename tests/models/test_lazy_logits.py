"""Lazy logits, which are never stored as a whole, equal ordinary logits."""

from unittest import mock

import pytest
import torch
from refusals import refused

import polyhead as ph
from polyhead.models.inputs_outputs import LazyLogits
from polyhead.ops import cross_entropy
from polyhead.tasks.scores import token_guesses, token_losses

ENDS = {
    "own": ph.Logits(23),
    "bias": ph.Logits(23, bias=True),
    "tied": ph.Logits(23, tied=True),
    "scaled": ph.Logits(23, tied=True, scaled=True),
}


def model_of(end, **changes):
    torch.manual_seed(0)
    shape = {"dim": 8, "layers": 1, "heads": ph.Softmax(2), "causal": True, "max_length": 6, **changes}
    return ph.Transformer(ph.TransformerConfig(ph.Tokens(23), end, **shape)).double()


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(23, (3, 6), generator=draw), torch.randint(23, (3, 6), generator=draw)


@pytest.mark.parametrize("tail", [None, 2])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_they_are_the_logits(monkeypatch, end, tail):
    monkeypatch.setattr(cross_entropy, "BLOCK", 50)
    model, (tokens, targets) = model_of(end), batch()
    targets = targets if tail is None else targets[:, -tail:]
    lazy, logits = model(tokens, tail=tail, lazy=True), model(tokens, tail=tail)
    assert isinstance(lazy, LazyLogits)
    assert torch.equal(token_guesses(lazy), token_guesses(logits))
    torch.testing.assert_close(token_losses(lazy, targets), token_losses(logits, targets))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(token_losses(lazy, targets).mean(), parameters)
    expected = torch.autograd.grad(token_losses(logits, targets).mean(), parameters)
    torch.testing.assert_close(gradients, expected)


def test_without_gradients_a_batch_is_scored_once(monkeypatch):
    model, (tokens, targets) = model_of(ENDS["own"]), batch()
    counted = mock.Mock(wraps=cross_entropy._logits)
    monkeypatch.setattr(cross_entropy, "_logits", counted)
    with torch.no_grad():
        lazy, logits = model(tokens, lazy=True), model(tokens)
        for _ in range(2):
            losses, guesses = lazy.cross_entropy(targets), lazy.argmax()
    assert counted.call_count == 1
    torch.testing.assert_close(losses, token_losses(logits, targets))
    assert torch.equal(guesses, logits.argmax(-1))
    with torch.no_grad():  # other targets are not those that were asked for
        other = (targets + 1) % 23
        torch.testing.assert_close(lazy.cross_entropy(other), token_losses(logits, other))
        other.copy_(targets)
        torch.testing.assert_close(lazy.cross_entropy(other), losses)
    assert torch.equal(model(tokens, lazy=True).argmax(), guesses)
    with torch.inference_mode():  # a tensor made here has no version that would tell of a change
        lazy, changed = model(tokens, lazy=True), (targets + 1) % 23
        lazy.cross_entropy(changed)
        changed.copy_(targets)
        torch.testing.assert_close(lazy.cross_entropy(changed), losses)


def test_products_are_in_autocasts_dtype_and_losses_are_not():
    model, (tokens, targets) = model_of(ENDS["tied"]).float(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lazy, logits = model(tokens, lazy=True), model(tokens).float()
    losses = lazy.cross_entropy(targets)  # asked outside of autocast, as the trainer does
    assert lazy.weight.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, token_losses(logits, targets), rtol=1e-5, atol=1e-5)


def test_lazy_logits_that_are_refused():
    tokens, targets = batch()
    classes, lazy = model_of(ph.Classes(3), causal=False), model_of(ENDS["own"])(tokens, lazy=True)
    for call, message in (
        (lambda: classes(tokens, lazy=True), r"lazy outputs are Logits\(\) but those of this model are Classes"),
        (lambda: lazy.cross_entropy(targets[:, 1:]), r"LazyLogits: targets .* must be \(3, 6\), got \(3, 5\)"),
    ):
        refused(call, message)
