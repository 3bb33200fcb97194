"""No query sees the future, for every op and impl, two ways: through gradients, and by cutting the sequence."""

import importlib

import pytest
import torch
from torch.testing import assert_close

from polyhead.ops.dispatch import BACKENDS, resolve

ALL = [(op, impl) for op, impls in BACKENDS.items() for impl in impls]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear_chunked"), "CHUNK", 3)
    blocked = importlib.import_module("polyhead.ops.hyla_blocked")
    monkeypatch.setattr(blocked, "QUERIES", 3)
    monkeypatch.setattr(blocked, "KEYS", 2)


@pytest.mark.parametrize(("op", "impl"), ALL)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (5, 8), (7, 5)])
def test_gradients_stop_at_the_present(problem, op, impl, t, s):
    torch.manual_seed(0)
    (q, k, v), _ = problem(t, s)
    out = resolve(op, impl)(q, k, v, causal=True)
    for i in range(t):
        grads = torch.autograd.grad(out[:, i].square().sum(), (q, k, v), retain_graph=True)
        assert (grads[0][:, [j for j in range(t) if j != i]] == 0).all()
        for g in grads[1:]:
            assert (g[:, max(0, i + 1 + s - t) :] == 0).all()
        # A softmax over a single key does not depend on that key, but its value counts.
        seen = grads[2].abs().sum((0, 2, 3)) > 0
        assert seen.tolist() == [j <= i + s - t for j in range(s)]


@pytest.mark.parametrize(("op", "impl"), ALL)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (5, 8), (7, 5)])
def test_outputs_equal_those_of_the_prefix(problem, op, impl, t, s):
    torch.manual_seed(1)
    (q, k, v), _ = problem(t, s)
    run = resolve(op, impl)
    out = run(q, k, v, causal=True)
    for i in range(max(1, t - s + 1), t + 1):
        keys = i + s - t
        prefix = run(q[:, :i], k[:, :keys], v[:, :keys], causal=True)
        assert_close(prefix, out[:, :i], rtol=1e-12, atol=1e-12)
