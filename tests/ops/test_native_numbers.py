"""The numbers of native code: at large scores, of every function of its own, by threads."""

import pytest
import torch
from compilers import READY
from problems import make_problem
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import Masks
from polyhead.ops.native import library as native, structs
from polyhead.ops.registry import IMPLS, resolve
from polyhead.spec import ACTS, NORMALISE, RELATION_ACTS

NATIVE_OPS = [op for op, impls in IMPLS.items() if "native" in impls]
needs_compiler = pytest.mark.skipif(not READY, reason="no compiler")


def native_and_exact(op, tensors, cotangent, **options):
    """Of native code, and of the reference in float64: output and gradients."""
    results = []
    for impl, dtype in (("native", tensors[0].dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = resolve(op, impl)(*leaves, **options)
        results.append([out, *torch.autograd.grad(out, leaves, cotangent.to(dtype))])
    return results


def test_float64_is_refused(monkeypatch):
    monkeypatch.delitem(native.COMPUTE_DTYPES, torch.float64)
    q, k, v = torch.zeros(3, 1, 2, 1, 1, dtype=torch.float64)
    message = "hyla: impl 'native' takes float32, bfloat16, float16 only, not torch.float64; use impl='auto'"
    with pytest.raises(ValueError, match=message):
        ops.hyla(q, k, v, impl="native")


def assert_errors_below(actual, exact, bound, case):
    for x, y in zip(actual, exact, strict=True):
        relative_error = ((x - y).norm() / y.norm()).item()
        assert relative_error < bound, case


OF_PAIRS = [("hyla", {"normalise": n, "act": act}, {}) for n in NORMALISE for act in ACTS]
OF_RELATIONS = [
    ("relational", {"relation_act": act}, {"offset": offset, "r": 5, "p": 6})
    for act in RELATION_ACTS
    for offset in (False, True)
    if act != "softmax"
]


@needs_compiler
@pytest.mark.parametrize(("op", "options", "shape"), OF_PAIRS + OF_RELATIONS)
def test_its_own_functions_are_those_of_float32(arguments, op, options, shape):
    """exp, erf and tanh are its own in float32, and the C library's in float64, where the grid looks."""
    tensors = arguments(op, make_problem(37, 37, dtype=torch.float32)[0], **shape)
    actual, expected = native_and_exact(op, tensors, torch.randn(2, 37, 4, 5), causal=True, **options)
    assert_errors_below(actual, expected, 3e-6, options)


@needs_compiler
@pytest.mark.parametrize("op", NATIVE_OPS)
def test_scores_may_be_large(arguments, op):
    """e^200 is infinite in float32, and e^-200 is 0."""
    (q, k, v), _ = make_problem(18, 20, dtype=torch.float32, d=4)
    choices = [{}] if op != "hyla" else [{"normalise": x, "act": "identity"} for x in NORMALISE]
    for options in choices:
        tensors = arguments(op, (q, k, v))
        actual, expected = native_and_exact(op, tensors, torch.randn(2, 18, 4, 5), scale=100.0, **options)
        assert all(x.isfinite().all() for x in actual)
        assert_errors_below(actual[:1], expected[:1], 1e-3, options)


@needs_compiler
@pytest.mark.parametrize("t", [2, 18])
@pytest.mark.parametrize("op", NATIVE_OPS)
def test_a_softmax_over_one_key_has_no_gradient_but_nan(arguments, op, t):
    """Not even roundings, which would be all there is: both passes round a score alike."""
    options = {"window": 1} | ({"normalise": "softmax", "act": "relu"} if op == "hyla" else {})
    tensors = arguments(op, make_problem(t, t, dtype=torch.float32, d=64)[0])
    out = resolve(op, "native")(*tensors, **options)
    for grad in torch.autograd.grad(out, tensors[:2], torch.randn(out.shape)):
        assert (grad == 0).all()

    options.pop("window")
    cotangent = torch.ones(2, t, 4, 5)
    cotangent[1, 0] = torch.nan
    tensors = arguments(op, make_problem(t, 1, dtype=torch.float32)[0])
    actual, expected = native_and_exact(op, tensors, cotangent, **options)
    assert not any((x.isfinite() & y.isnan()).any() for x, y in zip(actual, expected, strict=True))
    assert actual[2][1].isnan().all()


@needs_compiler
def test_the_gradient_of_a_score_with_nearly_all_of_the_weight():
    """It is that of the other key, with its sign turned; a code that is divided by its norm makes it large."""
    q, k, v = torch.zeros(1, 1, 2, 1), torch.zeros(1, 2, 2, 1), torch.randn(1, 2, 2, 5)
    bias = torch.tensor([[7.85, -7.85], [2.6, -2.5]])[None, :, None]  # weights 1.5e-7 and 6e-3 of the second key
    grads = []
    for impl, dtype in (("native", torch.float32), ("reference", torch.float64)):
        leaf = bias.to(dtype).requires_grad_()
        options = {"bias": leaf, "normalise": "softmax_rms_heads", "act": "identity"}
        out = resolve("hyla", impl)(*(x.to(dtype) for x in (q, k, v)), **options)
        grads += torch.autograd.grad(out.sum(), leaf)
    actual, expected = grads
    assert_close(actual.double(), expected, rtol=1e-5, atol=0)


def beside_poison(*sizes):
    """(b n h width) within NaN, in strides of their own."""
    for n, m, c in sizes:
        inner = torch.full((3, n + 5, m + 2, c + 3), torch.nan, dtype=torch.float64)[1:, 2 : n + 2, 1 : m + 1, :c]
        yield inner.copy_(torch.randn(inner.shape))


@pytest.mark.thinned(3)
@needs_compiler
@pytest.mark.parametrize("op", NATIVE_OPS)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (8, 8), (8, 2), (16, 16), (5, 5)])
def test_heads_and_widths_beside_poison(op, heads):
    """Neighbours of every argument are NaN, as is unwritten memory: sizes are no multiples of anything."""
    h, g = heads
    for t, s, d, e in ((1, 41, 18, 21), (19, 33, 1, 7), (33, 17, 18, 21), (70, 90, 2, 3)):
        tensors = [*beside_poison((t, h, d), (s, g, d), (s, g, e))]
        if op == "relational":
            by_offset = torch.randn(t + s + 3, g + 2, e + 1).double()[2:-2, 1:-1, 1:]
            *tensors, by_key = tensors
            symbols = by_key if t < s else by_offset
            weight = torch.randn(h, e, d + 4).double()
            tensors += [*beside_poison((t, d + 4, 3), (s, d + 4, 3)), symbols, weight]
        limits = {"bias": torch.randn(h, t + s + 3).double()[:, 1:-3], "window": 15}
        actual, expected = native_and_exact(op, tensors, torch.randn(2, t, h, e), **limits)
        for x, y in zip(actual, expected, strict=True):
            assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_wrong_edges_of_packed_sequences_lead_to_ranges_in_memory():
    """No op reads the entries of cu_seqlens, so any may come."""
    for edges in ([-1, 1, 3, -1], [0, 1, 2, 0], [0, 5, 1, 9]):
        masks = Masks(cu_seqlens=torch.tensor(edges, dtype=torch.int32))
        first, end, low, high = structs.ranges_of_both_sides(masks, 6, 6)
        for start, stop in ((first, end), (low, high)):
            assert all(0 <= i <= j <= 6 for i, j in zip(start, stop, strict=True))
            for ends in (start, stop):
                assert (ends.diff() >= 0).all()


KINDS = (None, "offset", "dense", "per_sample")
THREADED = [(op, bias) for op in (*NATIVE_OPS, "by offset") for bias in KINDS]


@pytest.mark.thinned(3)
@needs_compiler
@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize(("op", "bias"), THREADED)
def test_threads_share_the_work_and_nothing_else(arguments, op, bias, t):
    """The numbers of the reference, the same on two threads, and the same again."""
    qkv, options = make_problem(t, 150, bias=bias, causal=True, b=3)
    name = "relational" if op == "by offset" else op
    tensors = arguments(name, qkv, offset=op == "by offset")
    leaves = [*tensors, *([] if bias is None else [options["bias"]])]

    def grads(impl="native"):
        out = resolve(name, impl)(*tensors, **options)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    on_one_thread = grads()
    assert_close(on_one_thread, grads("reference"), rtol=1e-9, atol=1e-9)
    torch.set_num_threads(2)
    on_two_threads, again = grads(), grads()
    assert_close(on_two_threads, on_one_thread, rtol=1e-12, atol=1e-12)
    assert all((x == y).all() for x, y in zip(on_two_threads, again, strict=True))
