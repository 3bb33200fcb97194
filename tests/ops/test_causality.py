"""No query sees the future or keys beyond a window, in every op and impl, as gradients tell."""

import pytest
import torch
from some import some

from polyhead.ops.registry import IMPLS, TENSORS, resolve

ALL = [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl != "triton"]
"""Kernels have tests of their own, as their interpreter is slow."""

pytestmark = pytest.mark.usefixtures("small_tiles")


def sides(op, tensors):
    """Those of the receivers, those of the senders, and symbols (or values)."""
    given = dict(zip(TENSORS[op], tensors, strict=True))
    ours = [x for name, x in given.items() if name.startswith("q")]
    theirs = [x for name, x in given.items() if name.startswith("k")]
    return ours, [*theirs, given.get("symbols", given.get("v"))]


def limited(op, impl, tensors, **options):
    """The output, or a skipped test where the impl refuses."""
    try:
        return resolve(op, impl)(*tensors, **options)
    except ValueError as error:
        assert "takes no " in str(error)  # noqa: PT017
        pytest.skip(str(error))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("op", "impl"), ALL)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (5, 8), (7, 5)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 3), (True, 3)])
def test_gradients_stop_at_what_a_query_sees(problem, arguments, op, impl, t, s, causal, window):
    tensors = arguments(op, problem(t, s)[0])
    ours, theirs = sides(op, tensors)
    all_count = {"pool": "mean"} if op == "pooled" else {}  # a maximum has no gradient for most keys
    out = limited(op, impl, tensors, causal=causal, window=window, **all_count)
    for i in range(t):
        grads = torch.autograd.grad(out[:, i].square().sum(), [*ours, *theirs], retain_graph=True)
        place, far = i + s - t, s + t if window is None else window
        seen = [abs(j - place) < far and (j <= place or not causal) for j in range(s)]
        assert all((grad[:, [j for j in range(t) if j != i]] == 0).all() for grad in some(grads[: len(ours)]))
        assert all((grad[:, [j for j in range(s) if not seen[j]]] == 0).all() for grad in some(grads[len(ours) :]))
        # A softmax over a single key does not depend on that key, but its value counts.
        assert (grads[-1].abs().sum((0, 2, 3)) > 0).tolist() == seen
