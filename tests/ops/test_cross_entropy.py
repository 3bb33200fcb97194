"""Cross entropy in blocks of tokens against F.cross_entropy of the whole logits."""

import math

import pytest
import torch
from refusals import refusing
from some import some
from torch.nn import functional as F
from torch.testing import assert_close

from polyhead.ops import cross_entropy
from polyhead.ops.cross_entropy import chunked_cross_entropy, chunked_guesses


def problem(t, m, c, *, bias=True, scale=1.0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(t + 10 * c)
    x, weight, b = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((t, m), (c, m), (c,)))
    targets = torch.randint(c, (t,), generator=draw, dtype=torch.int8 if c < 100 else torch.int16)
    tensors = [scale * x, weight, b] if bias else [scale * x, weight]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], targets


def unchunked_losses(tensors, targets, factor=1.0):
    x, weight, *bias = tensors
    return F.cross_entropy(factor * F.linear(x, weight, *bias), targets.long(), reduction="none")


def assert_equal_to_unchunked(tensors, targets, *, factor=1.0, rtol=1e-12, atol=1e-13):
    """In blocks and as a whole, losses and gradients are the same, and finite; the gradient from above is uneven."""
    x, weight, *bias = tensors
    above = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    blocks = chunked_cross_entropy(x, weight, *(bias or [None]), targets, factor=factor)
    assert blocks.isfinite().all()
    both = blocks, unchunked_losses(tensors, targets, factor)
    actual, expected = ((losses, torch.autograd.grad((losses * above).sum(), tensors)) for losses in both)
    assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Two tokens of 12 entries, or one of more."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 24)


@pytest.mark.parametrize(("bias", "factor"), [(True, 1.0), (False, 0.3), (True, 0.3)])
@pytest.mark.parametrize(("t", "c"), [(5, 12), (7, 1), (1, 9), (6, 5), (9, 30), (0, 5)])
def test_equals_the_whole_logits(t, c, factor, bias):
    assert_equal_to_unchunked(*problem(t, 6, c, bias=bias), factor=factor)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e-9])
def test_huge_and_tiny_logits_and_forbidden_entries(scale):
    (x, weight, bias), targets = problem(8, 4, 11, scale=scale)
    assert_equal_to_unchunked([x, weight, bias], targets, rtol=1e-7, atol=1e-10)
    bias = bias.detach().index_fill(0, torch.arange(8), -torch.inf).requires_grad_()
    assert_equal_to_unchunked([x, weight, bias], targets % 3 + 8, rtol=1e-7, atol=1e-10)
    assert chunked_guesses(x, weight, bias, targets)[1].min() >= 8


def test_half_precision_is_no_worse_than_whole_logits():
    """Under autocast the sums are float32: the error is at most twice that of float32 losses of bfloat16 logits."""
    tensors, targets = problem(200, 16, 200, dtype=torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    losses = unchunked_losses(exact, targets)
    expected = [losses, *torch.autograd.grad(losses.mean(), exact)]
    x, weight, bias = tensors
    errors = []
    for is_in_blocks in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if is_in_blocks:
                losses = chunked_cross_entropy(x, weight, bias, targets)
            else:
                losses = F.cross_entropy(F.linear(x, weight, bias).float(), targets.long(), reduction="none")
        assert losses.dtype == torch.float32
        actual = [losses, *torch.autograd.grad(losses.mean(), tensors)]
        assert all(grad.dtype == torch.float32 for grad in actual)
        errors.append([(a.double() - b).norm() / b.norm() for a, b in zip(actual, expected, strict=True)])
    for chunked, unchunked in some(zip(*errors, strict=True)):
        assert chunked <= 2 * unchunked + 1e-6


def test_many_small_parts_of_a_gradient_add_up(monkeypatch):
    """A sum in bfloat16 of 600 halves, one a block, would stay at 128."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 1)
    x, weight = torch.ones(600, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    losses = chunked_cross_entropy(x, weight, None, torch.zeros(600, dtype=torch.long))
    (grad,) = torch.autograd.grad(losses.sum(), weight)
    assert grad.flatten().tolist() == [-300.0, 300.0]


def test_the_likeliest_is_the_first_of_equals_and_where_a_logit_is_nan_there_is_none_and_no_loss():
    draw, targets = torch.Generator().manual_seed(0), torch.arange(60) % 23
    x, weight = (torch.randint(-2, 3, size, generator=draw).double() for size in ((60, 3), (23, 3)))  # exact products
    losses, guesses = chunked_guesses(x, weight, None, targets)
    logits = x @ weight.T
    assert guesses.tolist() == [row.tolist().index(max(row)) for row in logits]
    assert any((row == row.max()).sum() > 1 for row in logits)
    assert_close(losses, unchunked_losses((x, weight), targets))
    x[1, 0], x[4, 2] = math.nan, -math.nan
    assert (chunked_guesses(x, weight, None, targets)[1] == -1).nonzero().flatten().tolist() == [1, 4]
    assert chunked_cross_entropy(x, weight, None, targets).isnan().nonzero().flatten().tolist() == [1, 4]


def test_no_block_is_larger_than_was_asked_or_saved(monkeypatch):
    """The size of a block: tokens times vocabulary."""
    blocks, original = [], cross_entropy._logits

    def recorded(*args):
        blocks.append(original(*args))
        return blocks[-1]

    monkeypatch.setattr(cross_entropy, "_logits", recorded)
    monkeypatch.setattr(cross_entropy, "BLOCK", 160)
    tensors, targets = problem(33, 3, 50)
    saved_sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_sizes.append(x.numel()) or x, lambda x: x):
        losses = chunked_cross_entropy(*tensors, targets)
    losses.sum().backward()
    assert max(block.numel() for block in blocks) == 150
    assert sum(block.numel() for block in blocks) == 2 * 33 * 50  # forward and backward
    assert max(saved_sizes) <= 150


def test_what_it_refuses():
    (x, weight, bias), targets = problem(4, 3, 7)
    for strange in (7, -100):
        wrong = targets.index_fill(0, torch.tensor(2), strange)
        with refusing(f"chunked_cross_entropy: targets must be 0 to 6, got {strange}"):
            chunked_cross_entropy(x, weight, bias, wrong)
        compiled = torch.compile(chunked_cross_entropy, backend="eager", fullgraph=True)
        assert compiled(x, weight, bias, wrong).isnan().tolist() == [False, False, True, False]
    with refusing("chunked_cross_entropy: m = 3 in x but 2 in weight"):
        chunked_cross_entropy(x, weight[:, :2], bias, targets)
