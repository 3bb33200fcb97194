"""Every op compiles as one graph for all lengths; the custom ops keep the rules of torch.library."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.dispatch import BACKENDS, IN_OP_FILE, PUBLIC
from polyhead.spec import RELATION_ACTS

pytestmark = pytest.mark.compile
RELATED = ("relational", "disentangled", "abstractor")
SKIPPED = (*IN_OP_FILE, "state")  # that one refuses the defaults, and is compiled in its own tests
PAIRS = [(op, impl) for op, impls in BACKENDS.items() for impl in ("auto", *impls) if impl not in SKIPPED]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


def check(run, make):
    """Compiled equals eager, output and gradients, in one graph for four lengths."""
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (9, 17, 33, 40):
        leaves = make(t)
        out, wanted = compiled(*leaves), run(*leaves)
        cotangent = torch.randn_like(wanted)
        grads = torch.autograd.grad(out, leaves, cotangent)
        assert_close(out, wanted)
        assert_close(grads, torch.autograd.grad(wanted, leaves, cotangent))
        if t == 9:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_one_graph_for_all_lengths(problem, arguments, op, impl):
    function = getattr(ops, PUBLIC[op])
    check(
        lambda q, *rest: function(q * 1.5, *rest, causal=True, impl=impl).sin(),
        lambda t: arguments(op, problem(t, t, d=8, e=8)[0]),
    )


@pytest.mark.parametrize("op", BACKENDS)
def test_one_graph_with_a_bias_by_offset_and_a_mask(problem, arguments, op):
    function = getattr(ops, PUBLIC[op])
    mask = torch.rand(2, 1, 1, 64) > 0.3

    def make(t):
        qkv, options = problem(t, t, bias="offset")
        return (options["bias"], *arguments(op, qkv, offset=op in RELATED))

    check(lambda bias, q, k, *rest: function(q, k, *rest, bias=bias, mask=mask[..., : k.shape[1]]), make)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler and there is no g++")
def test_the_whole_way_through_the_compiler(problem):
    """Inductor, too; once, as it takes its time."""
    compiled = torch.compile(lambda q, k, v: ops.hyla(q, k, v, causal=True, impl="blocked").sin(), fullgraph=True)
    qkv, _ = problem(9, 9, dtype=torch.float32)
    out, wanted = compiled(*qkv), ops.hyla(*qkv, causal=True, impl="reference").sin()
    assert_close(out, wanted)
    assert_close(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(wanted.sum(), qkv), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("full", [False, True])
def test_the_custom_ops_keep_the_rules(problem, arguments, full):
    (q, k, v), options = problem(3, 4, bias="offset", mask="rows", keep=True)
    absent = q.new_empty(0)
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
    bias, weight, *limits = (options["bias"], weight, options["mask"], options["keep"]) if full else [absent] * 4
    keywords = {"causal": True, "scale": 0.5, "normalise": "rms_heads", "act": "relu"}
    limits = [*limits, absent]
    torch.library.opcheck(torch.ops.polyhead.hyla_blocked, ([q, k, v, bias, weight], limits), keywords)
    *tensors, _ = arguments("relational", (q, k, v), offset=full)
    keywords = {"causal": True, "scale": 0.5, "act": "tanh"}
    torch.library.opcheck(torch.ops.polyhead.relational_blocked, ([*tensors, bias], limits), keywords)


@pytest.mark.parametrize("act", ["identity", "gelu", "gelu_tanh", "silu"])
def test_gradients_equal_finite_differences(problem, act):
    (q, k, v), options = problem(3, 4, bias="offset", mask="rows", causal=True)
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, bias, weight):
        return ops.hyla(q, k, v, **{**options, "bias": bias}, act=act, value_weight=weight, impl="blocked")

    assert torch.autograd.gradcheck(run, (q, k, v, options["bias"], weight), fast_mode=True)


@pytest.mark.parametrize("act", [a for a in RELATION_ACTS if a != "softmax"])
def test_gradients_of_relational_attention_equal_finite_differences(problem, arguments, act):
    qkv, options = problem(3, 4, bias="offset", mask="rows", causal=True, keep=True)

    def run(bias, *tensors):
        options["bias"] = bias
        return ops.relational_attention(*tensors, **options, relation_act=act, impl="blocked")

    leaves = arguments("relational", qkv, offset=act in ("tanh", "identity"))
    assert torch.autograd.gradcheck(run, (options["bias"], *leaves), fast_mode=True)
