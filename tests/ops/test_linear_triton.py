"""Linear attention's kernels in Triton's interpreter: output and every gradient against the reference, in float64.

Only a few cases, each ugly in several ways at once: the interpreter takes half a second for one.
"""

import importlib

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import INTERPRETED, TRITON
from polyhead.ops.custom_op_rules import packed
from polyhead.ops.linear.triton import preferred, unsupported_reason

pytestmark = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or triton's interpreter"
)
DEVICE = "cpu" if INTERPRETED else "cuda"

CASES = {
    "one pair": {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1},
    "three chunks and a bit, groups": {"t": 35, "s": 35, "act": "relu"},
    "more keys than queries, scale": {"t": 7, "s": 38, "h": 3, "g": 1, "scale": -0.7},
    "more queries than keys, hidden keys": {"t": 21, "s": 7, "h": 2, "mask": "keys"},
    "wide values, narrow queries": {"t": 18, "s": 20, "b": 1, "h": 2, "d": 17, "e": 19},
    "packed": {"t": 38, "edges": (0, 0, 1, 18, 32, 32, 38)},
    "packed, rows before and after, other layouts": {"t": 36, "edges": (2, 16, 17, 33), "h": 2, "layouts": True},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """As small as a card takes them; states are read and written in several pieces."""
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.triton"), "CHUNK", 16)
    kernels = importlib.import_module("polyhead.ops.linear.triton.kernels")
    monkeypatch.setattr(kernels, "WIDTH", {2: 16, 4: 16, 8: 16})


def run(impl, qkv, options, cotangent):
    out = ops.linear_attention(*qkv, **options, causal=True, impl=impl)
    return [out, *torch.autograd.grad(out, qkv, cotangent)]


def make(case, problem, dtype=torch.float64):
    case = {**case}
    t, layouts = case.pop("t"), case.pop("layouts", False)
    s = case.pop("s", t)
    extra = {key: case.pop(key) for key in ("act", "scale") if key in case}
    qkv, options = problem(t, s, dtype=dtype, **case)
    options = {key: options[key] for key in ("mask", "cu_seqlens") if options[key] is not None} | extra
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    if layouts:  # heads outside of rows, and columns that do not lie side by side
        qkv = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv[:2]] + [
            qkv[2].detach().mT.clone().mT
        ]
    return [x.detach().to(DEVICE).requires_grad_() for x in qkv], options


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(problem, name):
    torch.manual_seed(len(name))
    qkv, options = make(CASES[name], problem)
    q, _, v = qkv
    cotangent = torch.randn(*q.shape[:3], v.shape[-1], dtype=torch.float64, device=DEVICE)
    came, wanted = (run(impl, qkv, options, cotangent) for impl in ("triton", "reference"))
    for x, y in zip(came, wanted, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)
    if "hidden" in name:
        assert (came[0][:, :14] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    torch.manual_seed(1)
    qkv, options = make({"t": 35, "d": 8, "e": 8}, problem, dtype)
    cotangent = torch.randn(2, 35, 4, 8, dtype=dtype, device=DEVICE)
    exact = run("reference", [x.detach().double().requires_grad_() for x in qkv], options, cotangent.double())
    came, naive = (run(impl, qkv, options, cotangent) for impl in ("triton", "reference"))
    for x, y, z in some(zip(came, naive, exact, strict=True)):
        assert x.dtype == dtype
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


def test_states_are_not_in_half_precision():
    """One of 4096 and four chunks that add 1 each: in float16, 4096 + 1 is 4096; and 20 times 4096 is too much."""
    k = torch.zeros(1, 80, 1, 1, dtype=torch.float16, device=DEVICE)
    k[:, ::16] = 1
    v = k * (1 + 4095 * (k.cumsum(1) == 1))
    out = ops.linear_attention(torch.ones_like(k), k, v, causal=True, impl="triton")
    assert out[0, -1].item() == 4100
    large = torch.full_like(k, 64)
    out = ops.linear_attention(torch.full_like(k, 1e-3), large, large, causal=True, impl="triton")
    assert_close(out[0, -1].item(), 80 * 64 * 64 * 1e-3, rtol=1e-3, atol=0)


def test_refused_in_one_line(problem):
    qkv, _ = problem(3, 4)
    for changes, told in (
        ({}, "takes causal=True only"),
        ({"causal": True, "window": 2}, "takes no window"),
        ({"causal": True, "normalise": "softmax"}, "takes normalise='identity' only, not 'softmax'"),
    ):
        with pytest.raises(
            ValueError, match=f"^linear_attention: impl 'triton' {told}; use impl='auto' or 'reference'$"
        ):
            ops.linear_attention(*qkv, **changes, impl="triton")


def test_never_chosen_without_a_gpu(problem, monkeypatch):
    qkv, _ = problem(1, 1)
    assert not preferred(AttentionCall(*qkv, causal=True))
    cards = importlib.import_module("polyhead.ops.cards")
    monkeypatch.setattr(cards, "INTERPRETED", False)
    assert unsupported_reason(AttentionCall(*qkv, causal=True)) == "takes CUDA tensors only"
    monkeypatch.setattr(cards, "TRITON", False)
    assert unsupported_reason(AttentionCall(*qkv, causal=True)) == "needs triton, which is not installed"


def test_gradients_are_the_same_each_time_and_have_none_of_their_own(problem):
    qkv, options = make({"t": 20}, problem)
    out = ops.linear_attention(*qkv, **options, causal=True, impl="triton")
    first, again = (torch.autograd.grad(out.sum(), qkv, create_graph=True) for _ in range(2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    told = r"^linear_attention: impl 'triton' has no second derivative; use impl='reference'$"
    with pytest.raises(RuntimeError, match=told):
        torch.autograd.grad(first[0].sum(), qkv)


@pytest.mark.compile
def test_the_custom_op_keeps_the_rules(problem):
    (q, k, v), options = make({"t": 3, "h": 2, "edges": (0, 1, 3)}, problem)
    call = AttentionCall(q, k, v, causal=True, cu_seqlens=options["cu_seqlens"])
    keywords = {"causal": True, "scale": 0.5, "normalise": "identity", "act": "identity"}
    torch.library.opcheck(torch.ops.polyhead.linear_triton, packed(call), keywords)
