"""Linear attention against loops over explicit indices, in every backend; the state is what it claims to be.

The kernels in Triton have tests of their own.
"""

import importlib
import itertools

import pytest
import torch
from some import some
from torch._dynamo.utils import counters
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.cards import INTERPRETED, TRITON
from polyhead.ops.dispatch import BACKENDS
from polyhead.spec import ACTS, NORMALISE

IMPLS = [impl for impl in BACKENDS["linear"] if impl != "triton"]
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
    for (t, s), case in some(
        zip(itertools.cycle([(1, 4), (4, 4), (5, 3), (3, 5)]), CASES[start % 4 :: 4], strict=False)
    ):
        bias, mask, causal, keep = case
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep)
        out = ops.linear_attention(*qkv, **options, normalise=normalise, act=act)
        wanted = oracle(*qkv, **options).values(normalise, act)
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
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


@pytest.mark.parametrize("impl", IMPLS)
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
    ({"window": 2}, {}, "takes no window"),
    ({}, {"normalise": "softmax"}, "takes normalise='identity' only, not 'softmax'"),
]


@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
@pytest.mark.parametrize(("case", "extra", "text"), REFUSED, ids=[text[:12] for _, _, text in REFUSED])
def test_what_has_no_state_is_refused_in_one_line(problem, impl, case, extra, text):
    qkv, options = problem(3, 4, **case)
    with pytest.raises(ValueError, match=rf"^linear_attention: impl '{impl}' {text}; use impl='auto' or 'reference'$"):
        ops.linear_attention(*qkv, **options, **extra, impl=impl)
    ops.linear_attention(*qkv, **options, **extra)


# ------------------------------------------------------------------------------------------- packed sequences and steps
@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.chunked"), "CHUNK", 4)


PACKS = {
    "one": (0, 23),
    "empty and of length 1": (0, 0, 1, 2, 2, 15, 16, 23),
    "at the ends of chunks": (0, 4, 12, 16, 23),
    "rows before and after": (3, 5, 17),
}


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("edges", PACKS.values(), ids=PACKS)
def test_packed_sequences_are_those_sequences(problem, impl, causal, edges):
    """Output and gradients of each are what it gets alone; chunks are shorter than some and longer than others."""
    torch.manual_seed(0)
    qkv, options = problem(23, 23, edges=edges, causal=causal)
    out = ops.linear_attention(*qkv, **options, act="relu", impl=impl)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, cotangent)
    edges = (0, *edges[1:]) if edges[-1] == 23 else (0, *edges[1:], 23)
    for start, end in some(itertools.pairwise(edges)):
        alone = [x[:, start:end].detach().requires_grad_() for x in qkv]
        wanted = ops.linear_attention(*alone, causal=causal, act="relu", impl="reference")
        assert_close(out[:, start:end], wanted, rtol=1e-9, atol=1e-9)
        for x, y in some(zip(grads, torch.autograd.grad(wanted, alone, cotangent[:, start:end]), strict=True)):
            assert_close(x[:, start:end], y, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("causal", [False, True])
def test_a_short_sequence_keeps_its_digits_after_a_long_one(problem, causal):
    """The difference of two sums over the whole sample would be 0 there."""
    torch.manual_seed(0)
    (q, k, v), options = problem(23, 23, edges=(0, 14, 23), causal=causal, dtype=torch.float32)
    scale = torch.ones(23)
    scale[:14] = 1e6
    out = ops.linear_attention(q, k * scale[:, None, None], v * scale[:, None, None], **options, impl="chunked")
    wanted = ops.linear_attention(*(x[:, 14:] for x in (q, k, v)), causal=causal, impl="reference")
    assert_close(out[:, 14:], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("cuts", [(0, 23), (0, 1, 2, 9, 23), tuple(range(24)), (0, 0, 8, 8, 23)])
def test_steps_are_the_whole_call_in_pieces(problem, cuts):
    torch.manual_seed(0)
    qkv, options = problem(23, 23, causal=True, mask="keys")
    wanted = ops.linear_attention(*qkv, **options, scale=0.3, act="relu", impl="reference")
    outs, state = [], None
    for start, end in itertools.pairwise(cuts):
        new = [x[:, start:end] for x in qkv]
        out, state = ops.linear_step(*new, state, mask=options["mask"][..., start:end], scale=0.3, act="relu")
        outs.append(out)
    assert_close(torch.cat(outs, 1), wanted, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(wanted)
    came, grads = (torch.autograd.grad(x, qkv, cotangent) for x in (torch.cat(outs, 1), wanted))
    for x, y in zip(came, grads, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("impl", ["chunked", "triton"] if TRITON and INTERPRETED else ["chunked"])
@pytest.mark.parametrize("edges", [None, (0, 3, 9)])
def test_vmap_is_a_call_for_each(problem, impl, edges):
    torch.manual_seed(0)
    each, options = zip(*(problem(9, 9, edges=edges, causal=True, b=1) for _ in range(2)), strict=True)
    whole = [torch.stack(x) for x in zip(*each, strict=True)]

    def run(*qkv):
        return ops.linear_attention(*qkv, **options[0], impl=impl)

    assert_close(torch.vmap(run)(*whole), torch.stack([run(*qkv) for qkv in each]))


def test_the_state_of_half_precision_tokens_is_wider():
    k = torch.full((1, 1, 1, 1), 64.0, dtype=torch.float16)
    out, state = ops.linear_step(k, k, k, torch.full((1, 1, 1, 1), 2.0**17), scale=2.0**-9)
    assert state.item() == 2.0**17 + 64**2
    assert out.dtype == torch.float16
    assert out.item() == 64 * 2.0**-9 * (2.0**17 + 64**2)


def test_steps_refuse_what_does_not_fit(problem):
    (q, k, v), _ = problem(2, 2)
    state = torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    for arguments, mask, told in (
        (
            (q, k.float(), v),
            None,
            "q, k and v must have one dtype but have torch.float64, torch.float32, torch.float64",
        ),
        (
            (q, k, v, state.float()),
            None,
            "the state of torch.float64 tokens must be torch.float64 but is torch.float32",
        ),
        ((q, k, v), torch.ones(2, 2, dtype=torch.bool), r"mask must be one of keys \(b\|1, 1, 1, t\) but is \(2, 2\)"),
        ((q, k, v, state[:, :1]), None, r"g = 2 in k but 1 in state"),
    ):
        with pytest.raises(ValueError, match=f"^linear_step: {told}"):
            ops.linear_step(*arguments, mask=mask)


@pytest.mark.compile
@pytest.mark.usefixtures("chunks_of_four")
def test_packs_compile_for_all_lengths(problem):
    """The lengths of the sequences are data: other ones compile nothing new."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    run = torch.compile(
        lambda q, k, v, edges: ops.linear_attention(q * 1.5, k, v, causal=True, cu_seqlens=edges, impl="chunked").sin(),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    for edges in (0, 3, 3, 9), (0, 8, 10, 17), (0, 1, 2, 17):
        qkv, options = problem(edges[-1], edges[-1], edges=edges)
        for x in qkv:
            torch._dynamo.mark_dynamic(x, 1)
        out = run(*qkv, options["cu_seqlens"])
        q, *kv = qkv
        wanted = ops.linear_attention(q * 1.5, *kv, causal=True, cu_seqlens=options["cu_seqlens"], impl="reference")
        assert_close(out, wanted.sin())
        if edges[1] == 3:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    torch.library.opcheck(
        torch.ops.polyhead.sums_before, (torch.randn(1, 2, 3, 2, 2).requires_grad_(), torch.rand(3) > 0.5)
    )
