"""HYLA of second order: by its state it is what the reference is, pair by pair; steps are the whole call in pieces."""

import importlib
import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.state import preferred

PLAIN = {"normalise": "identity", "act": "identity"}
CASES = {
    "one pair": {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1},
    "chunks and a bit, groups": {"t": 23, "s": 23, "causal": True},
    "more keys than queries": {"t": 7, "s": 20, "causal": True, "mask": "keys", "h": 3, "g": 1},
    "more queries than keys": {"t": 20, "s": 7, "causal": True, "h": 2},
    "full": {"t": 9, "s": 11, "mask": "keys"},
    "one query": {"t": 1, "s": 6, "causal": True, "h": 2},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    for constant in ("SMALL", "LARGE"):
        monkeypatch.setattr(importlib.import_module("polyhead.ops.hyla.state"), constant, 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [None, -0.7])
def test_equals_the_reference(problem, name, scale):
    torch.manual_seed(len(name))
    case = {**CASES[name]}
    qkv, options = problem(case.pop("t"), case.pop("s"), **case)
    came, wanted = (ops.hyla(*qkv, **options, **PLAIN, scale=scale, impl=impl) for impl in ("state", "reference"))
    assert_close(came, wanted, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(wanted)
    for x, y in zip(*(torch.autograd.grad(out, qkv, cotangent) for out in (came, wanted)), strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert name != "more queries than keys" or (came[:, :13] == 0).all()


@pytest.mark.parametrize("cuts", [(0, 1, 2, 9, 15), tuple(range(16)), (0, 0, 8, 15)])
def test_steps_are_the_whole_call_in_pieces(problem, cuts):
    torch.manual_seed(0)
    qkv, options = problem(15, 15, causal=True)
    outs, state = [], None
    for start, end in itertools.pairwise(cuts):
        out, state = ops.hyla_step(*(x[:, start:end] for x in qkv), state, scale=0.3)
        outs.append(out)
    wanted = ops.hyla(*qkv, **options, **PLAIN, scale=0.3, impl="reference")
    assert_close(torch.cat(outs, 1), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("step", [ops.hyla_step, ops.linear_step])
def test_steps_refuse_two_dtypes_as_the_whole_call_does(step):
    q, k, v = torch.zeros(3, 1, 2, 2, 4)
    _, state = step(q, k, v)
    for place in range(3):
        given = [x.double() if i == place else x for i, x in enumerate((q, k, v))]
        kinds = ", ".join(str(x.dtype) for x in given)
        line = f"q, k and v must have one dtype but have {kinds}"
        with pytest.raises(ValueError, match=f"^{step.__name__}: {line}$"):
            step(*given)
        with pytest.raises(ValueError, match=f"^hyla: {line}$"):
            ops.hyla(*given, **PLAIN)
    with pytest.raises(
        ValueError, match=rf"^{step.__name__}: q, k and v must have one device but have cpu, cpu, meta$"
    ):
        step(q, k, v.to("meta"))
    with pytest.raises(
        ValueError, match=rf"^{step.__name__}: the state of torch.float32 tokens must be torch.float32 but"
    ):
        step(q, k, v, state.double())
    assert step(*(x.half() for x in (q, k, v)), state)[1].dtype == torch.float32


def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem):
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        qkv, options = problem(19, 19, causal=True, dtype=dtype)
        exact = ops.hyla(*(x.double() for x in qkv), **options, **PLAIN, impl="reference")
        came, naive = (ops.hyla(*qkv, **options, **PLAIN, impl=impl) for impl in ("state", "reference"))
        assert came.dtype == dtype
        assert (came.double() - exact).norm() <= 2 * (naive.double() - exact).norm()


REFUSED = [
    ({"act": "relu"}, {}, "act='identity' only, not 'relu'"),
    ({"normalise": "rms_heads"}, {}, "normalise='identity' only, not 'rms_heads'"),
    ({"value_weight": torch.zeros(4, 5, 5, dtype=torch.float64)}, {}, "no value_weight"),
    ({}, {"bias": "offset"}, "no bias"),
    ({}, {"keep": True}, "no keep"),
    ({}, {"window": 2}, "no window"),
    ({}, {"edges": (0, 2, 4)}, "no cu_seqlens"),
    ({}, {"mask": "plane"}, r"masks of keys \(b\|1, 1, 1, s\) only, not \(4, 4\)"),
]


@pytest.mark.parametrize(("changes", "case", "told"), REFUSED)
def test_what_has_no_state_is_refused_in_one_line(problem, changes, case, told):
    qkv, options = problem(4, 4, **case)
    with pytest.raises(ValueError, match=rf"^hyla: impl 'state' takes {told}; use impl='auto' or 'reference'$"):
        ops.hyla(*qkv, **options, **{**PLAIN, **changes}, impl="state")


@pytest.mark.parametrize(
    ("t", "h", "d", "causal", "pays"),
    [
        *((128, 8, 4, True, True), (96, 8, 4, True, False), (32, 8, 4, False, True), (31, 8, 4, False, False)),
        *((256, 4, 16, True, True), (255, 4, 16, True, False), (4096, 8, 32, True, False)),
    ],
)
def test_chosen_for_narrow_heads_and_long_sequences(monkeypatch, t, h, d, causal, pays):
    monkeypatch.setattr(importlib.import_module("polyhead.ops.hyla.state"), "LARGE", 128)
    q = torch.zeros(1, t, h, d)
    assert preferred(AttentionCall(q, q, q, causal=causal)) == pays


@pytest.mark.compile
def test_one_graph_for_all_lengths(problem):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    run = torch.compile(
        lambda q, k, v: ops.hyla(q * 1.5, k, v, causal=True, **PLAIN, impl="state"), fullgraph=True, backend="eager"
    )
    for t in (9, 17):
        qkv, _ = problem(t, t)
        for x in qkv:  # of all sizes only this one, which is enough to reason about
            torch._dynamo.mark_dynamic(x, 1)
        wanted = ops.hyla(qkv[0] * 1.5, *qkv[1:], causal=True, **PLAIN, impl="reference")
        assert_close(run(*qkv), wanted)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
