"""Softmax attention against loops over explicit indices, in every backend."""

import itertools

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.dispatch import BACKENDS

CASES = list(
    itertools.product(
        (None, "offset", "dense", "per_sample"), (None, "rows", "keys", "plane"), (False, True), (False, True)
    )
)


@pytest.mark.parametrize("impl", ["auto", *BACKENDS["softmax"]])
@pytest.mark.parametrize(("t", "s"), [(1, 4), (4, 4), (5, 3), (3, 5)])
def test_equals_the_loops(problem, oracle, impl, t, s):
    torch.manual_seed(t)
    taken = [case for case in CASES if not (impl == "sdpa" and case[3])]  # the kernels take no keep
    for bias, mask, causal, keep in some(taken[t % 3 :: 3]):
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep)
        out = ops.softmax_attention(*qkv, **options, impl=impl)
        assert_close(out.detach(), torch.tensor(oracle(*qkv, **options).values()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", BACKENDS["softmax"])
@pytest.mark.parametrize("mask", ["rows", "plane"])
def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, impl, mask):
    torch.manual_seed(0)
    qkv, options = problem(4, 6, mask=mask, bias="offset")
    out = ops.softmax_attention(*qkv, mask=options["mask"], bias=options["bias"], impl=impl)
    assert (out[0, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), (*qkv, options["bias"]))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, 2] == 0).all()


@pytest.mark.parametrize("impl", BACKENDS["softmax"])
def test_scale_and_grouped_heads(problem, oracle, impl):
    torch.manual_seed(0)
    for g in (1, 2, 4):
        qkv, _ = problem(3, 4, g=g, d=5, e=3)
        out = ops.softmax_attention(*qkv, scale=0.3, impl=impl)
        assert_close(out.detach(), torch.tensor(oracle(*qkv, scale=0.3).values()), rtol=1e-9, atol=1e-9)


def test_mistakes_are_one_clear_line(problem):
    (q, k, v), options = problem(3, 4, keep=True)
    with pytest.raises(
        ValueError, match=r"^softmax_attention: impl 'sdpa' takes no keep; use impl='auto' or 'reference'$"
    ):
        ops.softmax_attention(q, k, v, keep=options["keep"], impl="sdpa")
    with pytest.raises(ValueError, match=r"^softmax_attention: s = 4 in k but 3 in v \(b s g e\) = \(2, 3, 2, 5\)$"):
        ops.softmax_attention(q, k, v[:, :3])


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("mask", [None, "plane"])
def test_a_scale_that_is_not_positive_keeps_the_future_hidden(problem, oracle, scale, mask):
    """The kernel's own causal mask is -inf before it is scaled."""
    qkv, options = problem(33, 33, mask=mask)
    for impl in some(BACKENDS["softmax"]):
        out = ops.softmax_attention(*qkv, mask=options["mask"], scale=scale, causal=True, impl=impl)
        wanted = oracle(*qkv, mask=options["mask"], scale=scale, causal=True).values()
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_offset", [False, True])
def test_what_all_keys_share_in_a_bias_is_not_rounded_with_it(dtype, by_offset):
    """A bias in float32, as under autocast: of -300.2 bfloat16 knows multiples of 2, and of -70,000 float16 nothing."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, 8).to(dtype)
    bias = torch.randn(4, 17) if by_offset else torch.randn(2, 4, 9, 9)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    bias = bias - (70_000 if dtype == torch.float16 else 300.2)
    found = []
    for impl, kind in (("sdpa", dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        learned = bias.clone().requires_grad_()
        out = ops.softmax_attention(*leaves, bias=learned, mask=mask, impl=impl)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, learned])
        found.append([x.detach().double() for x in (out, *grads)])
    for came, plain, exact in zip(*found, strict=True):
        assert (came - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm()
