"""Cross entropy in tiles against F.cross_entropy of the whole logits: values, gradients, memory, refusals."""

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
    return [each.to(dtype).requires_grad_() for each in tensors], targets


def whole(tensors, targets, factor=1.0):
    x, weight, *bias = tensors
    return F.cross_entropy(factor * F.linear(x, weight, *bias), targets.long(), reduction="none")


def equal(tensors, targets, *, factor=1.0, chunk=4, rtol=1e-12, atol=1e-13):
    """In tiles and as a whole, losses and gradients are the same, and finite; the gradient from above is uneven."""
    x, weight, *bias = tensors
    above = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    tiled = chunked_cross_entropy(x, weight, *(bias or [None]), targets, factor=factor, chunk=chunk)
    assert tiled.isfinite().all()
    both = tiled, whole(tensors, targets, factor)
    assert_close(
        *((losses, torch.autograd.grad((losses * above).sum(), tensors)) for losses in both), rtol=rtol, atol=atol
    )


SIZES = [(5, 12, 4, 8), (5, 13, 4, 8), (7, 1, 4, 2), (1, 9, 3, 3), (1, 1, 1, 1), (6, 5, 100, 10), (9, 20, 7, 7)]
"""Tokens, entries, entries of a tile, logits of a tile: tiles that divide neither tokens nor entries."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize(("t", "c", "chunk", "tile"), [*SIZES, (0, 5, 2, 4)])
def test_equals_the_whole_logits(monkeypatch, t, c, chunk, tile, factor, bias):
    monkeypatch.setitem(cross_entropy.TILE, "cpu", tile)
    equal(*problem(t, 6, c, bias=bias), factor=factor, chunk=chunk)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e-9])
def test_huge_and_tiny_logits(scale):
    equal(*problem(8, 4, 11, scale=scale), rtol=1e-7, atol=1e-10)


def test_only_what_is_trained_gets_a_gradient():
    (x, weight, bias), targets = problem(4, 3, 7)
    for trained in ([x], [weight], [bias], [x, bias]):
        tensors = [each if any(each is one for one in trained) else each.detach() for each in (x, weight, bias)]
        grads = torch.autograd.grad(chunked_cross_entropy(*tensors, targets, chunk=3).sum(), trained)
        wanted = torch.autograd.grad(whole(tensors, targets).sum(), trained)
        assert_close(grads, wanted)


def test_half_precision_is_no_worse_than_whole_logits(monkeypatch):
    """Under autocast the sums are float32: the error is at most twice that of float32 losses of bfloat16 logits."""
    monkeypatch.setitem(cross_entropy.TILE, "cpu", 8 * 8)
    tensors, targets = problem(200, 16, 200, dtype=torch.float32)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    losses = whole(exact, targets)
    wanted = [losses, *torch.autograd.grad(losses.mean(), exact)]
    x, weight, bias = tensors
    errors = []
    for tiled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if tiled:
                losses = chunked_cross_entropy(x, weight, bias, targets, chunk=8)
            else:
                losses = F.cross_entropy(F.linear(x, weight, bias).float(), targets.long(), reduction="none")
        assert losses.dtype == torch.float32
        got = [losses, *torch.autograd.grad(losses.mean(), tensors)]
        assert all(grad.dtype == torch.float32 for grad in got)
        errors.append([(a.double() - b).norm() / b.norm() for a, b in zip(got, wanted, strict=True)])
    for tiled, plain in some(zip(*errors, strict=True)):
        assert tiled <= 2 * plain + 1e-6


def test_many_small_parts_of_a_gradient_add_up(monkeypatch):
    """A sum in bfloat16 of 600 halves, one a tile, would stay at 128."""
    monkeypatch.setitem(cross_entropy.TILE, "cpu", 1)
    x, weight = torch.ones(600, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(600, dtype=torch.long)
    losses = chunked_cross_entropy(x, weight, None, targets, chunk=1)
    assert losses.dtype == torch.float32
    (grad,) = torch.autograd.grad(losses.sum(), weight)
    assert grad.flatten().tolist() == [-300.0, 300.0]


def test_nothing_is_the_likeliest_where_a_logit_is_nan():
    x = torch.randn(6, 3)
    x[1] = x[4] = math.nan
    guesses = chunked_guesses(x, torch.randn(11, 3), None, torch.arange(6), chunk=4)[1]
    assert (guesses == -1).tolist() == [False, True, False, False, True, False]


def test_the_likeliest_is_the_first_of_equals():
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-2, 3, size, generator=draw).double() for size in ((60, 3), (23, 3)))  # exact products
    losses, guesses = chunked_guesses(x, weight, None, torch.arange(60) % 23, chunk=4)
    logits = x @ weight.T
    wanted = [row.tolist().index(max(row)) for row in logits]
    assert guesses.tolist() == wanted
    assert any((row == row.max()).sum() > 1 for row in logits)
    assert_close(losses, whole((x, weight), torch.arange(60) % 23))


def test_no_tile_is_larger_than_was_asked(monkeypatch):
    """The size of a tile: tokens times vocabulary."""
    made, plain = [], cross_entropy._logits

    def watched(*args):
        made.append(plain(*args))
        return made[-1]

    monkeypatch.setattr(cross_entropy, "_logits", watched)
    monkeypatch.setitem(cross_entropy.TILE, "cpu", 60)
    tensors, targets = problem(33, 3, 50)
    chunked_cross_entropy(*tensors, targets, chunk=20).sum().backward()
    assert max(tile.numel() for tile in made) == 60
    assert sum(tile.numel() for tile in made) == 2 * 33 * 50  # forward and backward


def test_what_it_refuses():
    (x, weight, bias), targets = problem(4, 3, 7)
    for strange in (7, -100):
        with refusing(f"chunked_cross_entropy: targets must be 0 to 6 but {strange} came"):
            chunked_cross_entropy(x, weight, bias, targets.index_fill(0, torch.tensor(2), strange))
    with refusing("chunked_cross_entropy: chunk must be at least 1 but is 0"):
        chunked_cross_entropy(x, weight, bias, targets, chunk=0)
    with refusing("chunked_cross_entropy: m = 3 in x but 2 in weight"):
        chunked_cross_entropy(x, weight[:, :2], bias, targets)
    (once,) = torch.autograd.grad(chunked_cross_entropy(x, weight, bias, targets).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"it has no second derivative; use F.cross_entropy of the logits"):
        once.sum().backward()


@pytest.mark.compile
@pytest.mark.parametrize("bias", [True, False])
def test_compiles_whole(bias):
    tensors, targets = problem(6, 4, 11, bias=bias)

    def loss(*given):
        return chunked_cross_entropy(*given, targets, chunk=4).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    given = [*tensors, *([] if bias else [None])]
    results = [torch.autograd.grad(function(*given), tensors) for function in (compiled, loss)]
    assert_close(*results)


def test_entries_that_a_bias_forbids_cost_nothing():
    """All of the first two chunks."""
    (x, weight, bias), _ = problem(5, 4, 12)
    bias = bias.detach().index_fill(0, torch.arange(8), -torch.inf).requires_grad_()
    equal([x, weight, bias], torch.tensor([8, 9, 10, 11, 8]))
    assert chunked_guesses(x, weight, bias, torch.full((5,), 8), chunk=4)[1].min() >= 8


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal(*problem(5, 4, 12))
