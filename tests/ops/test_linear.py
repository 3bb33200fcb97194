"""Linear attention against loops over explicit indices, in every backend; the state is what it claims to be."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.dispatch import BACKENDS
from polyhead.spec import ACTS, NORMALISE

CASES = list(
    itertools.product(
        (None, "offset", "dense", "per_sample"), (None, "rows", "keys", "plane"), (False, True), (False, True)
    )
)


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("act", ACTS)
def test_equals_the_loops(problem, oracle, normalise, act):
    torch.manual_seed(0)
    start = NORMALISE.index(normalise) + ACTS.index(act)
    for (t, s), case in zip(itertools.cycle([(1, 4), (4, 4), (5, 3), (3, 5)]), CASES[start % 4 :: 4], strict=False):
        bias, mask, causal, keep = case
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep)
        out = ops.linear_attention(*qkv, **options, normalise=normalise, act=act)
        wanted = oracle(*qkv, **options).values(normalise, act)
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", BACKENDS["linear"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "keys"])
def test_every_backend_equals_the_loops(problem, oracle, impl, causal, mask):
    torch.manual_seed(0)
    for t, s in [(1, 1), (1, 6), (6, 1), (4, 7), (7, 4), (5, 5)]:
        qkv, options = problem(t, s, causal=causal, mask=mask)
        out = ops.linear_attention(*qkv, **options, impl=impl, act="relu")
        wanted = oracle(*qkv, **options).values("identity", "relu")
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_sequence_of_several_chunks(problem, impl):
    """Longer than a chunk, and not a multiple of it."""
    torch.manual_seed(0)
    qkv, _ = problem(150, 150, b=1)
    q, k, v = (x.detach() for x in qkv)
    out = ops.linear_attention(q, k, v, causal=True, scale=1.0, impl=impl)
    state = torch.zeros(2, 3, 5, dtype=torch.float64)
    for i in range(150):
        state += k[0, i, :, :, None] * v[0, i, :, None, :]
        wanted = torch.stack([q[0, i, h] @ state[h // 2] for h in range(4)])
        assert_close(out[0, i], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, normalise):
    torch.manual_seed(0)
    qkv, options = problem(4, 6, mask="rows", bias="offset")
    out = ops.linear_attention(*qkv, mask=options["mask"], bias=options["bias"], normalise=normalise)
    assert (out[0, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), (*qkv, options["bias"]))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("impl", BACKENDS["linear"])
def test_a_batch_of_padding_gives_zero(problem, impl):
    qkv, _ = problem(3, 4)
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask[0] = False
    out = ops.linear_attention(*qkv, mask=mask, impl=impl)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()


REFUSED = [
    ({"bias": "offset"}, {}, "takes no bias"),
    ({"keep": True}, {}, "takes no keep"),
    ({"mask": "plane"}, {}, r"takes masks of keys \(b\|1, 1, 1, s\) only, not \(3, 4\)"),
    ({}, {"normalise": "softmax"}, "takes normalise='identity' only, not 'softmax'"),
]


@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
@pytest.mark.parametrize(("case", "extra", "text"), REFUSED, ids=[text[:12] for _, _, text in REFUSED])
def test_what_has_no_state_is_refused_in_one_line(problem, impl, case, extra, text):
    qkv, options = problem(3, 4, **case)
    with pytest.raises(ValueError, match=rf"^linear_attention: impl '{impl}' {text}; use impl='auto' or 'reference'$"):
        ops.linear_attention(*qkv, **options, **extra, impl=impl)
    ops.linear_attention(*qkv, **options, **extra)
