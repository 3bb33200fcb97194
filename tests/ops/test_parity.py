"""Every backend of the table against its reference: output and every gradient, over all options.

Registering a backend in dispatch.BACKENDS is enough to be tested here.  What a backend does not take, it must refuse
in one line.
"""

import importlib
import itertools

import pytest
import torch
from torch.testing import assert_close

from polyhead.ops.code import Inputs
from polyhead.ops.dispatch import BACKENDS, IN_OP_FILE, TENSORS, resolve
from polyhead.spec import ACTS, NORMALISE, RELATION_ACTS

RELATIONS = [(1, 5, False), (3, 1, True), (8, 2, False)]
RELATED = [{"offset": o, "r": r, "p": p, "symmetric": y} for o in (False, True) for r, p, y in RELATIONS]
PAIRS = [(op, impl) for op, impls in BACKENDS.items() for impl in impls if impl != "reference"]
VARIANTS = {
    "softmax": [{}],
    "linear": [{"normalise": n, "act": a} for n, a in itertools.product(NORMALISE, ACTS)],
    "hyla": [
        {"normalise": n, "act": a, "deep": deep} for n, a, deep in itertools.product(NORMALISE, ACTS, (False, True))
    ],
    "relational": [{"relation_act": a, **x} for a, x in itertools.product(RELATION_ACTS, RELATED)],
    "abstractor": [{"act": a, "offset": o} for a, o in itertools.product(RELATION_ACTS, (False, True))],
}
SHAPE = ("offset", "r", "p", "symmetric")
"""Of a variant, what shapes the arguments; the rest are options of the op."""
GRID = [(op, impl, variant) for op, impl in PAIRS for variant in VARIANTS[op]]
SIZES = [(1, 1), (1, 6), (5, 5), (7, 4), (4, 9)]
BIASES = (None, "offset", "dense", "per_sample")
CASES = list(itertools.product(SIZES, BIASES, (None, "rows", "keys"), (False, True), (False, True)))


def name(case):
    op, impl, variant = case
    return "-".join([op, impl, *(str(x) for x in variant.values())])


def stride(op):
    """Options x cases is large for HYLA: each of its variants takes every 7th case, and together they take all."""
    return {"hyla": 7, "linear": 3, "relational": 23, "abstractor": 5}.get(op, 1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """No size of the grid is a multiple of these."""
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear_chunked"), "CHUNK", 3)
    blocked = importlib.import_module("polyhead.ops.hyla_blocked")
    for constant, value in {"QUERIES": 3, "KEYS": 2, "PAIRS": 1, "ROWS": 50}.items():
        monkeypatch.setattr(blocked, constant, value)
    blocked = importlib.import_module("polyhead.ops.relational_blocked")
    for constant, value in {"QUERIES": 3, "PAIRS": 20, "ROWS": 50}.items():
        monkeypatch.setattr(blocked, constant, value)
    monkeypatch.setattr(importlib.import_module("polyhead.ops.relational_sdpa"), "WIDTH", 4)


def refusal(op, impl, tensors, options, variant):
    """Why the backend does not take the inputs, by its own account; recurrent takes what chunked takes."""
    file = f"{op}_{'chunked' if impl in IN_OP_FILE else impl}"
    parts = {key: options[key] for key in ("bias", "mask", "keep", "causal")}
    given = dict(zip(TENSORS[op], tensors, strict=True))
    given = {"v" if name == "symbols" else name: x for name, x in given.items()}
    act = variant.get("relation_act", variant.get("act", "identity"))
    inputs = Inputs(**given, **parts, normalise=variant.get("normalise", "softmax"), act=act)
    return importlib.import_module(f"polyhead.ops.{file}").refusal(inputs)


def shape(variant):
    return {key: value for key, value in variant.items() if key in SHAPE}


def run(op, impl, tensors, options, variant, weight, cotangent):
    """Output and gradients, one after the other."""
    extra = {key: value for key, value in variant.items() if key not in (*SHAPE, "deep")}
    if variant.get("deep"):
        extra["value_weight"] = weight
    out = resolve(op, impl)(*tensors, **options, **extra)
    leaves = [*tensors, *(x for x in (options["bias"], extra.get("value_weight")) if x is not None)]
    return [out, *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.parametrize("case", GRID, ids=name)
def test_backend_equals_reference(monkeypatch, problem, arguments, case):
    op, impl, variant = case
    offset = GRID.index(case)
    torch.manual_seed(offset)
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
    relational = importlib.import_module("polyhead.ops.relational_blocked")
    for n, ((t, s), bias, mask, keep, causal) in enumerate(CASES[offset % stride(op) :: stride(op)]):
        monkeypatch.setattr(relational, "PAIRS", (20, 400)[n % 2])  # samples one by one in pieces, and together
        monkeypatch.setattr(relational, "ROWS", (50, 400)[n % 2])
        qkv, options = problem(t, s, bias=bias, mask=mask, keep=keep, causal=causal)
        tensors = arguments(op, qkv, **shape(variant))
        if refusal(op, impl, tensors, options, variant) is not None:
            with pytest.raises(ValueError, match=rf"impl '{impl}' takes .*; use impl='auto' or 'reference'$"):
                run(op, impl, tensors, options, variant, weight, None)
            continue
        cotangent = torch.randn(2, t, 4, 5, dtype=torch.float64)
        wanted = run(op, "reference", tensors, options, variant, weight, cotangent)
        came = run(op, impl, tensors, options, variant, weight, cotangent)
        where = f"t {t} s {s} bias {bias} mask {mask} keep {keep} causal {causal}"
        for x, y in zip(came, wanted, strict=True):
            assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, where=where: f"{where}: {text}")
        if mask == "rows":
            assert (came[0][0, t // 2] == 0).all()
        assert all(x.isfinite().all() for x in wanted)


def test_the_grid_is_neither_empty_nor_refused_throughout(problem, arguments):
    for op, impl in PAIRS:
        taken, easy = 0, {"normalise": "identity", "act": "softmax" if op == "abstractor" else "identity"}
        for (t, s), bias, mask, keep, causal in CASES:
            qkv, options = problem(t, s, bias=bias, mask=mask, keep=keep, causal=causal)
            taken += refusal(op, impl, arguments(op, qkv), options, easy) is None
        assert taken >= (len(CASES) if impl == "blocked" else 12)


def error(came, exact):
    return [((x.double() - y).norm() / (y.norm() + 1e-9)).item() for x, y in zip(came, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "impl"), PAIRS)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem, arguments, op, impl, dtype, causal):
    torch.manual_seed(5)
    qkv, options = problem(33, 33, causal=causal, d=8, e=8, h=4, g=4, dtype=dtype)
    cotangent = torch.randn(2, 33, 4, 8, dtype=dtype)
    tensors = arguments(op, qkv, p=8)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = run(op, "reference", wide, options, {}, None, cotangent.double())
    budget = error(run(op, "reference", tensors, options, {}, None, cotangent), exact)
    came = run(op, impl, tensors, options, {}, None, cotangent)
    assert all(x.dtype == dtype for x in came)
    for mine, allowed in zip(error(came, exact), budget, strict=True):
        assert mine <= 2 * allowed


@pytest.mark.parametrize("impl", BACKENDS["softmax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_softmax_backends_at_enormous_logits(impl, dtype):
    q = torch.tensor([100.0, -100.0], dtype=dtype)[None, :, None, None]
    k = torch.tensor([100.0, 100.0, -100.0], dtype=dtype)[None, :, None, None]
    v = torch.tensor([1.0, 3.0, 5.0], dtype=dtype)[None, :, None, None]
    out = resolve("softmax", impl)(q, k, v, scale=1.0)
    assert_close(out.flatten().double(), torch.tensor([2.0, 5.0], dtype=torch.float64))
