"""Every backend of the table against its reference: output and every gradient, over all options.

A backend of an op is tested here because it is in the table of that op.  What a backend does not take, it must refuse
in one line.
"""

import itertools

import pytest
import torch
from compilers import IMPLS
from problems import VARIANTS, options_of, shape_of
from rules import REQUIRED_OPTIONS
from some import some
from torch.testing import assert_close

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.registry import OPS, TENSORS, resolve
from polyhead.ops.relational import sdpa

SKIPPED = ("reference", "triton")
"""The specification; kernels, whose interpreter is too slow: they have own tests."""
PAIRS = [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl not in SKIPPED]
GRID = [(op, impl, variant) for op, impl in PAIRS for variant in VARIANTS[op]]
SIZES = [(1, 1), (1, 6), (5, 5), (7, 4), (4, 9)]
OPTIONS = [(None, "offset", "dense", "per_sample"), (None, "rows", "keys", "thin"), (False, True), (False, True)]
PACKED = (0, 4, 4, 5, 8)
"""Edges of sequences, one of them empty and one of length 1; a row before the first belongs to it."""
LIMITS = [(size, n, None) for size, n in zip([(1, 6), (5, 5), (5, 5), (7, 4), (7, 4), (4, 9)], 3 * (1, 3), strict=True)]
LIMITS += [((9, 9), None, PACKED), ((9, 9), 3, PACKED)]


CASES = [(size, None, None, *options) for size, *options in itertools.product(SIZES, *OPTIONS)]
CASES += [(*limits, *options) for limits, *options in itertools.product(LIMITS, *OPTIONS)][::5]
"""Sizes, window, edges of packed sequences, bias, mask, keep, causal."""


def name(case):
    op, impl, variant = case
    return "-".join([op, impl, *(str(x) for x in variant.values())])


def cases(op, impl, offset):
    """Options x cases is large: each variant of HYLA takes every 95th case, which together are 130 of 317.

    Tiles made of a reference are one code for all ops, which share the cases out."""
    if impl == "blocked":
        step = 7 if op == "softmax" else 61
    else:
        step = {"hyla": 95, "linear": 47, "relational": 95, "abstractor": 13}.get(op, 1)
    return CASES[11 * offset % step :: step]  # not neighbours, which are alike


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch, small_tiles):
    """Sizes of the grid are several of these, and few are multiples."""
    monkeypatch.setattr(sdpa, "WIDTH", 4)


def refusal(op, impl, tensors, options, variant, weight=None):
    """Why the backend does not take the inputs, by its own account."""
    masks = Masks(options["mask"], options["causal"], options["window"], options["cu_seqlens"])
    tensors_by_name = dict(zip(TENSORS[op], tensors, strict=True))
    tensors_by_name = {"v" if name == "symbols" else name: x for name, x in tensors_by_name.items()}
    choices = {
        "normalise": variant.get("normalise", "softmax"),
        "act": variant.get("relation_act", variant.get("act", "identity")),
        "value_weight": weight if variant.get("deep") else None,
    }
    call = AttentionCall(**tensors_by_name, bias=options["bias"], masks=masks, keep=options["keep"], **choices)
    return OPS[op].backends[impl].unsupported_reason(call)


def run(op, impl, tensors, options, variant, weight, cotangent):
    """Output and gradients, one after the other."""
    extra = options_of(variant)
    if variant.get("deep"):
        extra["value_weight"] = weight
    out = resolve(op, impl)(*tensors, **options, **extra)
    leaves = [*tensors, *(x for x in (options["bias"], extra.get("value_weight")) if x is not None)]
    return [out, *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", GRID, ids=name)
def test_backend_equals_reference(problem, arguments, case):
    op, impl, variant = case
    offset = GRID.index(case)
    torch.manual_seed(offset)
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
    for n, ((t, s), window, edges, bias, mask, keep, causal) in some(enumerate(cases(op, impl, offset))):
        limits = {"window": window, "edges": edges}
        b = 3 if n % 3 == 1 else 2
        g, scale = (2, 1, 4)[n // 3 % 3], (None, -0.3)[n // 2 % 2]
        qkv, options = problem(t, s, bias=bias, mask=mask, keep=keep, causal=causal, b=b, g=g, **limits)
        options["scale"] = scale
        tensors = arguments(op, qkv, **shape_of(variant))
        if refusal(op, impl, tensors, options, variant, weight) is not None:
            with pytest.raises(ValueError, match=rf"impl '{impl}' takes .*; use impl='auto' or 'reference'$"):
                run(op, impl, tensors, options, variant, weight, None)
            continue
        cotangent = torch.randn(len(qkv[0]), t, 4, 5, dtype=torch.float64)
        expected = run(op, "reference", tensors, options, variant, weight, cotangent)
        actual = run(op, impl, tensors, options, variant, weight, cotangent)
        case_name = f"t {t} s {s} g {g} scale {scale} bias {bias} mask {mask} keep {keep} causal {causal} {limits}"
        for x, y in some(zip(actual, expected, strict=True)):
            assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, case_name=case_name: f"{case_name}: {text}")
        if mask == "rows":
            assert (actual[0][0, t // 2] == 0).all()
        assert all(x.isfinite().all() for x in expected)


def test_the_grid_is_neither_empty_nor_refused_throughout(problem, arguments):
    for op, impl in some(PAIRS):
        num_accepted = 0
        easy = {"normalise": "identity", "act": "softmax" if op == "abstractor" else "identity"}
        for (t, s), window, edges, bias, mask, keep, causal in CASES:
            limits = {"window": window, "edges": edges}
            qkv, options = problem(t, s, bias=bias, mask=mask, keep=keep, causal=causal, **limits)
            num_accepted += refusal(op, impl, arguments(op, qkv), options, easy) is None
        assert num_accepted >= (len(CASES) if impl == "blocked" else 12)


def relative_errors(actual, exact):
    return [((x.double() - y).norm() / (y.norm() + 1e-9)).item() for x, y in zip(actual, exact, strict=True)]


HALVES = [
    (*pair, dtype, (n + m) % 2 == 1)
    for n, pair in enumerate(PAIRS)
    for m, dtype in enumerate((torch.bfloat16, torch.float16))
]
"""Every impl in both dtypes, causal in one of them."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("op", "impl", "dtype", "causal"), HALVES)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem, arguments, op, impl, dtype, causal):
    qkv, options = problem(33, 33, causal=causal, d=8, e=8, h=4, g=4, dtype=dtype)
    variant = REQUIRED_OPTIONS.get(impl, {})
    cotangent = torch.randn(2, 33, 4, 8, dtype=dtype)
    tensors = arguments(op, qkv, p=8)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = run(op, "reference", wide, options, variant, None, cotangent.double())
    budget = relative_errors(run(op, "reference", tensors, options, variant, None, cotangent), exact)
    actual = run(op, impl, tensors, options, variant, None, cotangent)
    assert all(x.dtype == dtype for x in actual)
    for relative_error, allowed in some(zip(relative_errors(actual, exact), budget, strict=True)):
        assert relative_error <= 2 * allowed
