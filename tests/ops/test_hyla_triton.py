"""HYLA's kernels in Triton's interpreter: output and every gradient against the reference, in float64.

Only a few cases, each ugly in several ways at once: the interpreter takes a quarter of a second for one.
"""

import dataclasses
import importlib

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead.ops import hyla
from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import INTERPRETED
from polyhead.ops.custom_op_rules import packed
from polyhead.ops.hyla.triton import preferred, unsupported_reason

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or triton's interpreter"
)
DEVICE = "cpu" if INTERPRETED else "cuda"

SOFTMAX = {"normalise": "softmax"}
PLAIN = {"b": 2, "h": 4, "g": 4, "d": 3, "e": 5}
CASES = {
    "one pair": {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1},
    "more queries than keys": {"t": 19, "s": 7, "h": 5, "g": 5, "d": 4, "causal": True, "bias": True},
    "padded heads": {"t": 7, "s": 30, "h": 3, "g": 3, "bias": True, "scale": -0.7},
    "all keys of a sample hidden": {"t": 9, "s": 33, "h": 2, "g": 1, "e": 2, "hidden": True, "act": "identity"},
    "hidden samples": {"t": 3, "s": 18, "b": 5, "hidden": "samples"},
    "packed": {"edges": (0, 0, 1, 12, 33), "h": 8, "g": 2, "causal": True, "bias": True},
    "packed, rows after the last": {"edges": (0, 17, 17, 31), "rows": 33, "window": 12, "normalise": "identity"},
    "window": {"t": 26, "s": 26, "window": 10, "bias": True, "normalise": "identity", "act": "identity"},
    "causal window": {"t": 19, "s": 33, "h": 5, "g": 1, "window": 4, "causal": True, "bias": True, "tile": (32, 32)},
    "tiles of two sizes": {
        "t": 33,
        "s": 19,
        "h": 3,
        "g": 3,
        "tile": (16, 32),
        "hidden": True,
        "causal": True,
        "bias": True,
        "scale": -0.7,
    },
    "tiles of two other sizes": {"t": 19, "s": 33, "window": 9, "tile": (32, 16)},
    "wide values, cut": {"t": 7, "s": 17, "h": 4, "g": 2, "e": 35, "bias": True},
    "halves of wide values": {"t": 18, "s": 17, "h": 3, "g": 1, "e": 35, "causal": True, "halves": True},
    "few sums of biases at once": {"t": 18, "s": 18, "causal": True, "bias": True, "constants": {"PARTIAL": 1}},
    "decoding": {"t": 3, "s": 49, "causal": True, "window": 40, "hidden": True, "constants": {"SPLIT": 16}},
    "softmax": {"t": 17, "s": 19, "g": 2, "causal": True, "window": 9, "bias": True, "hidden": True} | SOFTMAX,
    "softmax, more queries than keys": {"t": 19, "s": 7, "h": 5, "g": 5, "causal": True, "act": "identity"} | SOFTMAX,
    "softmax, packed": {"edges": (0, 0, 1, 12, 19), "h": 3, "g": 1, "bias": True, "tile": (16, 16)} | SOFTMAX,
    "softmax, decoding": {"t": 1, "s": 49, "h": 8, "g": 8, "constants": {"SPLIT": 16}} | SOFTMAX,
    "a card with less memory": {
        "t": 5,
        "s": 18,
        "bias": True,
        "constants": {"shared_memory": lambda device: 163 << 10},
    },
    "other layouts": {"t": 17, "s": 18, "g": 2, "b": 3, "causal": True, "layouts": True},
    "the widest window": {"t": 3, "s": 17, "window": 2**31 - 1, "causal": True},
}


def other_layouts(x, last):
    """The same numbers, with heads outside of rows, or with samples innermost."""
    x = x.detach()
    x = x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) if last else x.transpose(1, 2).contiguous().mT.mT
    return (x if last else x.transpose(1, 2)).requires_grad_()


def make(case, problem, dtype=torch.float64):
    """Tensors with gradients, and options."""
    case = {**PLAIN, **case}
    edges, shape = case.get("edges"), {key: case[key] for key in PLAIN}
    t, s = (case.get("rows", edges[-1]),) * 2 if edges else (case["t"], case["s"])
    shape["b"] = 1 if edges else shape["b"]
    qkv, options = problem(t, s, bias="offset" if case.get("bias") else None, dtype=dtype, **shape)
    if case.get("layouts"):
        qkv = [other_layouts(x, last=n == 1) for n, x in enumerate(qkv)]
    options |= {key: case[key] for key in ("causal", "window", "scale", "normalise", "act") if key in case}
    options["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32, device=DEVICE) if edges else None
    if case.get("hidden"):
        options["mask"] = (torch.rand(shape["b"], 1, 1, s + 3, device=DEVICE) > 0.4)[..., 1 : s + 1]
        options["mask"][0] = False
        options["mask"] = options["mask"][..., :1] if case["hidden"] == "samples" else options["mask"]
    qkv, options["bias"] = [x.detach().to(DEVICE).requires_grad_() for x in qkv], moved(options["bias"])
    return qkv, options


def moved(bias):
    return None if bias is None else bias.detach().to(DEVICE).requires_grad_()


def run(impl, qkv, options, cotangent):
    out = hyla(*qkv, **options, impl=impl)
    leaves = [*qkv, *(x for x in (options["bias"],) if x is not None)]
    return [out, *torch.autograd.grad(out, leaves, cotangent)]


MORE = (
    *("packed", "window", "more queries than keys", "padded heads", "tiles of two other sizes"),
    *("softmax, more queries than keys", "a card with less memory"),
)
"""Each beside another case with what makes it hard: for the campaign."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n in MORE)) for n in CASES])
def test_kernels_equal_the_reference(monkeypatch, problem, name):
    case = CASES[name]
    kernels = importlib.import_module("polyhead.ops.hyla.triton.kernels")
    for constant, value in case.get("constants", {}).items():
        monkeypatch.setattr(kernels, constant, value)
    if "tile" in case:
        monkeypatch.setattr(kernels, "tile", lambda *_: kernels.Tile(*case["tile"], 8, 1))
    if "halves" in case:
        monkeypatch.setattr(kernels, "tile", lambda kernel, _: kernels.Tile(16, 16, 8, 1, halves=kernel == "keys"))
    torch.manual_seed(len(name))
    qkv, options = make(case, problem)
    cotangent = torch.randn(*qkv[0].shape[:3], qkv[2].shape[3], dtype=torch.float64, device=DEVICE)
    if case.get("layouts"):
        cotangent = cotangent[:, :, :, :1].expand_as(cotangent)  # as the gradient of a sum is
    came, wanted = (run(impl, qkv, options, cotangent) for impl in ("triton", "reference"))
    for x, y in zip(came, wanted, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)
    if case.get("hidden"):
        assert (came[0][0] == 0).all()
        assert all((x[0] == 0).all() for x in came[1:4])


def test_single_precision(problem):
    torch.manual_seed(0)
    qkv, options = make(
        {"t": 19, "s": 33, "h": 3, "g": 1, "d": 7, "causal": True, "bias": True}, problem, torch.float32
    )
    cotangent = torch.randn(2, 19, 3, 5, device=DEVICE)
    for x, y in some(zip(*(run(impl, qkv, options, cotangent) for impl in ("triton", "reference")), strict=True)):
        assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("act", ["relu", pytest.param("identity", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem, dtype, act):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    torch.manual_seed(1)
    qkv, options = make({"t": 33, "s": 33, "d": 8, "e": 8, "causal": True, "act": act}, problem, dtype)
    cotangent = torch.randn(2, 33, 4, 8, dtype=dtype, device=DEVICE)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = run("reference", wide, options, cotangent.double())
    came, naive = (run(impl, qkv, options, cotangent) for impl in ("triton", "reference"))
    assert all(x.dtype == dtype for x in came)
    for x, y, z in zip(came, naive, exact, strict=True):
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


def test_sums_are_not_in_half_precision():
    """One of 4096 and four tiles that add 1 each: in float16, 4096 + 1 is 4096."""
    long = torch.zeros(1, 80, 1, 1, dtype=torch.float16, device=DEVICE)
    long[:, ::16] = 1
    one, terms = torch.ones_like(long[:, :1]).requires_grad_(), (long * (1 + 4095 * (long.cumsum(1) == 1))).detach()
    ones = torch.ones_like(long).requires_grad_()
    out = hyla(one, ones, terms, normalise="identity", impl="triton")
    assert out.item() == 4100
    assert torch.autograd.grad(out.sum(), one)[0].item() == 2 * 4100
    value = one.detach().clone().requires_grad_()
    out = hyla(ones, one, value, normalise="identity", impl="triton")
    dk, dv = torch.autograd.grad(out, (one, value), terms)
    assert (dk.item(), dv.item()) == (2 * 4100, 4100)


REFUSED = [
    ({"normalise": "softmax_heads"}, "normalise='rms_heads', 'identity' or 'softmax' only, not 'softmax_heads'"),
    ({"act": "gelu"}, "act='relu' or 'identity' only, not 'gelu'"),
    ({"value_weight": torch.zeros(4, 5, 5)}, "no value_weight"),
    ({"keep": torch.ones(1, 1, 3, 6)}, "no keep"),
    ({"bias": torch.zeros(1, 4, 3, 6)}, r"biases by offset \(h t\+s-1\) only, not \(1, 4, 3, 6\)"),
    ({"mask": torch.ones(3, 6, dtype=torch.bool)}, r"masks of keys \(b\|1, 1, 1, s\) only, not \(3, 6\)"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_refused_in_one_line(changes, told):
    q, k, v = torch.zeros(2, 3, 4, 3), torch.zeros(2, 6, 4, 3), torch.zeros(2, 6, 4, 5)
    with pytest.raises(ValueError, match=rf"^hyla: impl 'triton' takes {told}; use impl='auto' or 'reference'$"):
        hyla(q, k, v, **changes, impl="triton")


@pytest.mark.parametrize(
    ("h", "d", "taken"), [(16, 64, True), (17, 32, True), (16, 65, False), (32, 1, True), (33, 1, False)]
)
def test_more_than_a_program_holds_is_refused(h, d, taken):
    q, v = torch.zeros(1, 1, h, d), torch.zeros(1, 1, h, 4096)
    reason = unsupported_reason(AttentionCall(q, q, v, normalise="rms_heads", act="relu"))
    told = f"takes at most 32 heads and heads x width up to 1024 (padded, torch.float32), not {h} x {d}"
    assert reason == (None if taken else told)


@pytest.mark.parametrize(
    ("dtype", "d", "taken"), [(torch.bfloat16, 32, True), (torch.bfloat16, 33, False), (torch.float32, 17, False)]
)
def test_a_card_with_too_little_memory_is_refused_before_it_is_asked(monkeypatch, dtype, d, taken):
    """So that "auto" passes the kernels over on a card where they could not start."""
    monkeypatch.setattr(importlib.import_module("polyhead.ops.hyla.triton"), "shared_memory", lambda device: 99 << 10)
    x = torch.zeros(1, 4, 8, d, dtype=dtype)
    most = 512 if dtype == torch.bfloat16 else 256
    told = f"takes heads x width up to {most} on a card with 99 KB of shared memory, not 8 x {d} (padded, {dtype})"
    assert unsupported_reason(AttentionCall(x, x, x, normalise="rms_heads", act="relu")) == (None if taken else told)


KEYS = [(8, torch.bfloat16, 163, 16), (16, torch.bfloat16, 227, 8), (8, torch.float32, 163, 8)]
"""Heads of width 64, dtype, KB of shared memory, keys of a tile of the kernel of keys."""

TILES = [
    (8, torch.bfloat16, 227, 32),
    (8, torch.bfloat16, 99, 16),
    (4, torch.float16, 99, 32),
    (9, torch.bfloat16, 227, 16),
    (8, torch.float32, 227, 16),
]
"""Heads of width 64, dtype, KB of shared memory, queries of a tile."""


def problem_of(h, dtype):
    kernels, x = importlib.import_module("polyhead.ops.hyla.triton.kernels"), torch.zeros(1, 4, h, 64, dtype=dtype)
    options = {"causal": True, "window": 0, "scale": 1.0, "normalise": "rms_heads", "act": "relu"}
    return kernels.prepare(x, x, x, None, None, None, **options)


def tile(kernel, h, dtype, kb):
    kernels = importlib.import_module("polyhead.ops.hyla.triton.kernels")
    return kernels.tile(kernel, dataclasses.replace(problem_of(h, dtype), shared=kb << 10))


def test_long_rows_have_smaller_tiles_where_there_is_less_memory():
    """Rows of 4 KB: what an A100 has room for was found by compiling, see benchmarks/ahead_of_time.py."""
    sizes = [tile("queries", 16, torch.float32, kb).queries for kb in (163, 227)]
    assert sizes == [2, 8]


@pytest.mark.parametrize(("h", "dtype", "kb", "rows"), TILES)
def test_few_heads_leave_room_for_more_queries(h, dtype, kb, rows):
    assert tile("forward", h, dtype, kb).queries == rows


@pytest.mark.parametrize(("h", "dtype", "kb", "rows"), KEYS)
def test_wide_values_are_computed_in_halves_where_registers_are_few(h, dtype, kb, rows):
    size = tile("keys", h, dtype, kb)
    C = problem_of(h, dtype).config(size)
    assert (size.keys, C.halves) == (rows, dtype == torch.bfloat16)
    assert (C.v.tile.width_padded, C.more_v.tile.first) == ((32, 32) if C.halves else (64, 0))


@pytest.mark.parametrize(("h", "held", "between"), [(1, 2, 8), (3, 4, 4), (8, 8, 2), (9, 16, 1), (20, 32, 1)])
def test_heads_are_not_padded_but_where_a_product_sums_over_them(h, held, between):
    """A product sums over 16 terms at least; where there are fewer heads, rows of zeros lie between their values."""
    kernels = importlib.import_module("polyhead.ops.hyla.triton.kernels")
    C = problem_of(h, torch.bfloat16).config(kernels.Tile(16, 16, 8, 1))
    assert {x.heads_padded for x in (C.q, C.k, C.v.tile, C.out.tile)} == {held}
    assert {x.spread for x in (C.q, C.k, C.v.tile, C.out.tile)} == {1}
    assert {(x.heads_padded, x.spread) for x in (C.v.deep, C.out.deep)} == {(held * between, between)}


def test_never_chosen_without_a_gpu(problem):
    qkv, _ = problem(5, 5)
    assert preferred(AttentionCall(*qkv)) == (DEVICE == "cuda" and qkv[0].is_cuda)


def test_a_second_derivative_is_refused(problem):
    qkv, options = make({"t": 3, "s": 3}, problem)
    first = torch.autograd.grad(hyla(*qkv, **options, impl="triton").sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^hyla: impl 'triton' has no second derivative; use impl='reference'$"):
        torch.autograd.grad(first[0].sum(), qkv)


@pytest.mark.compile
def test_one_graph_for_all_lengths(problem):
    torch.manual_seed(2)
    run = torch.compile(
        lambda q, k, v, bias: hyla(q * 1.5, k, v, bias=bias, causal=True, window=7, impl="triton").sin(),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for t in (5, 9):
        (q, k, v), options = make({"t": t, "s": t, "bias": True}, problem)
        leaves = q, k, v, options["bias"]
        out, wanted = run(*leaves), hyla(q * 1.5, k, v, bias=leaves[3], causal=True, window=7, impl="reference").sin()
        assert_close(out, wanted)
        assert_close(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves))


@pytest.mark.compile
@pytest.mark.parametrize("full", [False, True])
def test_the_custom_op_keeps_the_rules(problem, full):
    (q, k, v), options = make({"t": 3, "s": 4, "bias": True, "hidden": True}, problem)
    call = AttentionCall(q, k, v, **({"bias": options["bias"], "mask": options["mask"]} if full else {}))
    window = 3 if full else None
    keywords = {"causal": True, "window": window, "scale": 0.5, "normalise": "rms_heads", "act": "relu"}
    torch.library.opcheck(torch.ops.polyhead.hyla_triton, packed(call), keywords)


def test_a_weight_is_as_exact_as_its_score_where_all_scores_are_large():
    """They are 2^14 and a little more, without rounding; the log-sum-exp next to it would be off by up to 2^-10."""
    little = torch.arange(7.0, device=DEVICE) / 4
    k = torch.stack((torch.ones_like(little), little), 1)[None, :, None].requires_grad_()
    q = torch.tensor([2.0**14, 1.0], device=DEVICE).expand(1, 3, 1, 2).clone().requires_grad_()
    v, dout = torch.randn(1, 7, 1, 2, device=DEVICE).requires_grad_(), torch.randn(1, 3, 1, 2, device=DEVICE)
    options = {"normalise": "softmax", "act": "identity", "scale": 1.0, "bias": None}
    came = run("triton", (q, k, v), options, dout)
    exact = run("reference", [x.detach().double().requires_grad_() for x in (q, k, v)], options, dout.double())
    for n in (0, 3):  # the output and the gradient of the values
        assert_close(came[n].double(), exact[n], rtol=2e-6, atol=1e-6)
