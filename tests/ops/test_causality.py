"""No query sees the future, for every op and impl, two ways: through gradients, and by cutting the sequence."""

import importlib

import pytest
import torch
from torch.testing import assert_close

from polyhead.ops.dispatch import BACKENDS, TENSORS, resolve

ALL = [(op, impl) for op, impls in BACKENDS.items() for impl in impls]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear_chunked"), "CHUNK", 3)
    blocked = importlib.import_module("polyhead.ops.hyla_blocked")
    monkeypatch.setattr(blocked, "QUERIES", 3)
    monkeypatch.setattr(blocked, "KEYS", 2)
    monkeypatch.setattr(importlib.import_module("polyhead.ops.relational_blocked"), "QUERIES", 3)


def sides(op, tensors):
    """Those of the receivers, those of the senders, and symbols (or values)."""
    given = dict(zip(TENSORS[op], tensors, strict=True))
    ours = [x for name, x in given.items() if name.startswith("q")]
    theirs = [x for name, x in given.items() if name.startswith("k")]
    return ours, [*theirs, given.get("symbols", given.get("v"))]


@pytest.mark.parametrize(("op", "impl"), ALL)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (5, 8), (7, 5)])
def test_gradients_stop_at_the_present(problem, arguments, op, impl, t, s):
    torch.manual_seed(0)
    tensors = arguments(op, problem(t, s)[0])
    ours, theirs = sides(op, tensors)
    out = resolve(op, impl)(*tensors, causal=True)
    for i in range(t):
        grads = torch.autograd.grad(out[:, i].square().sum(), [*ours, *theirs], retain_graph=True)
        for g in grads[: len(ours)]:
            assert (g[:, [j for j in range(t) if j != i]] == 0).all()
        for g in grads[len(ours) :]:
            assert (g[:, max(0, i + 1 + s - t) :] == 0).all()
        # A softmax over a single key does not depend on that key, but its value counts.
        seen = grads[-1].abs().sum((0, 2, 3)) > 0
        assert seen.tolist() == [j <= i + s - t for j in range(s)]


@pytest.mark.parametrize(("op", "impl"), ALL)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (5, 8), (7, 5)])
def test_outputs_equal_those_of_the_prefix(problem, arguments, op, impl, t, s):
    torch.manual_seed(1)
    tensors, run = arguments(op, problem(t, s)[0]), resolve(op, impl)
    out = run(*tensors, causal=True)
    for i in range(max(1, t - s + 1), t + 1):
        keys = i + s - t
        cut = {"q": i, "k": keys, "v": keys, "s": keys, "r": None}  # by first letter; weights stay whole
        part = [x[:, : cut[name[0]]] for name, x in zip(TENSORS[op], tensors, strict=True)]
        prefix = run(*part, causal=True)
        assert_close(prefix, out[:, :i], rtol=1e-12, atol=1e-12)
