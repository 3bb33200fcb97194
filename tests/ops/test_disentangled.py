"""Disentangled relational attention against loops over explicit indices."""

import itertools

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.spec import RELATION_ACTS

CASES = list(itertools.product(RELATION_ACTS, (False, True), (None, "rows", "keys", "plane"), (False, True)))


@pytest.mark.parametrize(("t", "s"), [(1, 4), (4, 4), (5, 3), (3, 5)])
def test_equals_the_loops(problem, arguments, oracle, t, s):
    torch.manual_seed(t)
    for n, (act, offset, mask, causal) in some(list(enumerate(CASES))[t % 2 :: 2]):
        bias, keep = (None, "offset", "dense", "per_sample")[(n + n // 4) % 4], n % 3 == 0
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep, g=(1, 2, 4)[(n + t) % 3])
        q, k, q_rel, k_rel, symbols = arguments("disentangled", qkv, offset=offset, p=(1, 5)[n % 2])
        out = ops.disentangled_attention(q, k, q_rel, k_rel, symbols, **options, relation_act=act)
        wanted = oracle(q, k, symbols, **options).disentangled(q_rel, k_rel, act)
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("act", RELATION_ACTS)
def test_what_comes_later_changes_nothing(problem, arguments, act):
    torch.manual_seed(2)
    tensors = [x.detach() for x in arguments("disentangled", problem(6, 6)[0])]
    out = ops.disentangled_attention(*tensors, causal=True, relation_act=act)
    for x in tensors:
        x[:, -1] += 1.0
    again = ops.disentangled_attention(*tensors, causal=True, relation_act=act)
    assert torch.equal(again[:, :5], out[:, :5])


def test_gradients_equal_finite_differences(problem, arguments):
    torch.manual_seed(0)
    qkv, options = problem(3, 4, bias="offset", mask="rows", causal=True)

    def run(bias, *tensors):
        return ops.disentangled_attention(*tensors, **{**options, "bias": bias}, relation_act="softmax")

    leaves = arguments("disentangled", qkv, offset=True)
    assert torch.autograd.gradcheck(run, (options["bias"], *leaves), fast_mode=True)


def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, arguments):
    qkv, options = problem(4, 6, mask="rows")
    tensors = arguments("disentangled", qkv)
    for act in some(RELATION_ACTS):
        out = ops.disentangled_attention(*tensors, mask=options["mask"], relation_act=act)
        assert (out[0, 2] == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), tensors))


def test_mistakes_are_one_clear_line(problem, arguments):
    q, k, q_rel, k_rel, symbols = arguments("disentangled", problem(3, 4)[0])
    with pytest.raises(ValueError, match=r"^disentangled_attention: h = 4 in q but 3 in q_rel \(b t h p\) ="):
        ops.disentangled_attention(q, k, q_rel[:, :, :3], k_rel, symbols)
    with pytest.raises(ValueError, match=r"^disentangled_attention: g = 2 in k but 4 in k_rel \(b s g p\) ="):
        ops.disentangled_attention(q, k, q_rel, torch.zeros(2, 4, 4, 2), symbols)
    with pytest.raises(ValueError, match="unknown relation_act 'sofmax'; did you mean 'softmax'"):
        ops.disentangled_attention(q, k, q_rel, k_rel, symbols, relation_act="sofmax")
