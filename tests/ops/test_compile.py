"""Every op compiles as one graph for all lengths; the custom ops keep the rules of torch.library."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.registry import IMPLS, OPS

pytestmark = pytest.mark.compile
ELSEWHERE = ("reference", "triton", "chunked")  # compiled in their own tests, the last in that of its heads
PAIRS = [("hyla", "auto")] + [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl not in ELSEWHERE]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def check(run, make, backend):
    """Compiled equals eager, output and gradients, in one graph for three lengths."""
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for t in (9, 17, 40):
        leaves = make(t)
        actual, expected = compiled(*leaves), run(*leaves)
        cotangent = torch.randn_like(expected)
        gradients = torch.autograd.grad(actual, leaves, cotangent)
        assert_close(actual, expected)
        assert_close(gradients, torch.autograd.grad(expected, leaves, cotangent))
        if t == 9:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_one_graph_for_all_lengths(problem, arguments, op, impl):
    """Our own operations with their derivatives traced, too; PyTorch's have theirs."""
    function = getattr(ops, OPS[op].name)
    check(
        lambda q, *others: function(q * 1.5, *others, causal=True, impl=impl).sin(),
        lambda t: arguments(op, problem(t, t, d=8, e=8)[0]),
        "eager" if impl == "sdpa" else "aot_eager",
    )


@pytest.mark.parametrize("full", [False, True])
def test_the_custom_ops_keep_the_rules(problem, full):
    (q, k, v), options = problem(3, 4, bias="offset", mask="rows", keep=True)
    limits = {"bias": options["bias"], "keep": options["keep"]} if full else {}
    masks = Masks(options["mask"] if full else None, causal=True)
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True) if full else None
    options = {"scale": 0.5, "normalise": "rms_heads", "act": "relu"}
    call = AttentionCall(q, k, v, masks=masks, value_weight=weight, **limits, **options)
    tensors, keywords = OPS["hyla"].backends["blocked"].arguments(call)
    torch.library.opcheck(torch.ops.polyhead.hyla_blocked, tuple(tensors), keywords)
