"""Relational cross-attention of the Abstractor against loops over explicit indices, in every backend."""

import itertools

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.dispatch import BACKENDS
from polyhead.spec import RELATION_ACTS

CASES = list(itertools.product(RELATION_ACTS, (False, True), (None, "rows", "keys", "plane"), (False, True)))


@pytest.mark.parametrize("impl", ["auto", *BACKENDS["abstractor"]])
@pytest.mark.parametrize(("t", "s"), [(1, 4), (4, 4), (5, 3), (3, 5)])
def test_equals_the_loops(problem, arguments, oracle, impl, t, s):
    torch.manual_seed(t)
    taken = 0
    for n, (act, offset, mask, causal) in list(enumerate(CASES))[t % 2 :: 2]:
        bias, keep = (None, "offset", "dense", "per_sample")[(n + n // 4) % 4], n % 3 == 0
        if impl == "sdpa" and (act != "softmax" or offset or keep):
            continue
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep, g=(1, 2, 4)[(n + t) % 3])
        q, k, symbols = arguments("abstractor", qkv, offset=offset)
        out = ops.abstractor_attention(q, k, symbols, **options, act=act, impl=impl)
        wanted = oracle(q, k, symbols, **options).abstractor(act)
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)
        taken += 1
    assert taken


@pytest.mark.parametrize("act", RELATION_ACTS)
def test_what_comes_later_changes_nothing(problem, act):
    torch.manual_seed(2)
    tensors = [x.detach() for x in problem(6, 6)[0]]
    out = ops.abstractor_attention(*tensors, causal=True, act=act)
    for x in tensors:
        x[:, -1] += 1.0
    assert_close(ops.abstractor_attention(*tensors, causal=True, act=act)[:, :5], out[:, :5], rtol=0, atol=1e-12)


def test_gradients_equal_finite_differences(problem, arguments):
    torch.manual_seed(0)
    qkv, options = problem(3, 4, bias="offset", mask="rows", causal=True)

    def run(bias, *tensors):
        return ops.abstractor_attention(*tensors, **{**options, "bias": bias}, act="sigmoid")

    leaves = arguments("abstractor", qkv, offset=True)
    assert torch.autograd.gradcheck(run, (options["bias"], *leaves), fast_mode=True)


def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem):
    tensors, options = problem(4, 6, mask="rows")
    for act in some(RELATION_ACTS):
        out = ops.abstractor_attention(*tensors, mask=options["mask"], act=act)
        assert (out[0, 2] == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), tensors))


def test_mistakes_are_one_clear_line(problem):
    q, k, symbols = problem(3, 4)[0]
    with pytest.raises(ValueError, match=r"^abstractor_attention: s = 4 in k but 3 in symbols \(b s g e\) ="):
        ops.abstractor_attention(q, k, symbols[:, :3])
    with pytest.raises(ValueError, match=r"^abstractor_attention: unknown act 'softmx'; did you mean 'softmax'\?"):
        ops.abstractor_attention(q, k, symbols, act="softmx")
    with pytest.raises(ValueError, match=r"^abstractor_attention: impl 'sdpa' takes act='softmax' only, not 'relu'"):
        ops.abstractor_attention(q, k, symbols, act="relu", impl="sdpa")


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_a_bias_is_not_rounded_with_the_scores(impl):
    """In half precision, as that of softmax attention, which it equals."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, 8).bfloat16()
    bias = torch.randn(4, 17) - 300.2
    out = ops.abstractor_attention(q, k, v, bias=bias, impl=impl)
    wanted = ops.softmax_attention(q.double(), k.double(), v.double(), bias=bias, impl="reference")
    assert (out - wanted).norm() <= 0.01 * wanted.norm()
