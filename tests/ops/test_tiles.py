"""Which tiles of pairs are computed, what is saved for the backward pass, large scores in float16, chunks."""

import functools

import pytest
import torch
from compilers import IMPLS
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import Masks
from polyhead.ops.hyla import blocked as hyla_blocked, tiles as hyla_tiles

T = 48
LIMITS = [{}, {"causal": True}, {"window": 5}, {"causal": True, "window": 9}]
LIMITS += [{"edges": (0, 5, 6, 20, T), **x} for x in ({}, {"causal": True, "window": 7})]


@pytest.fixture
def computed(monkeypatch):
    """A function that runs a call forward and backward: the tiles of its scores, which are the same in both passes, how
    often each pair is in them, and the pairs that are visible."""

    def run(call, leaf, options):
        seen, compute = [], hyla_tiles.Scores.tile

        def tile(scores, at):
            seen.append(at)
            return compute(scores, at)

        monkeypatch.setattr(hyla_tiles.Scores, "tile", tile)
        out = call()
        forward = len(seen)
        torch.autograd.grad(out.sum(), leaf)
        assert seen[:forward] == seen[forward:]
        covered, limits = torch.zeros(T, T), {name: options[name] for name in ("window", "cu_seqlens")}
        for at in some(seen[:forward]):
            covered[at.q, at.k] += 1
        look = Masks(None, options["causal"], **limits).visible(T, T, leaf.device)
        return seen[:forward], covered, torch.ones(T, T, dtype=torch.bool) if look is None else look

    return run


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("normalise", ["rms_heads", "softmax"])
def test_a_tile_without_a_visible_pair_is_never_computed(monkeypatch, problem, computed, normalise, limits):
    monkeypatch.setattr(hyla_blocked, "QUERIES", 9)
    monkeypatch.setattr(hyla_blocked, "KEYS", 4)
    qkv, options = problem(T, T, b=1, **limits)
    run = functools.partial(ops.hyla, *qkv, **options, normalise=normalise, impl="blocked")
    tiles, covered, look = computed(run, qkv[0], options)
    assert all(look[at.q, at.k].any(0).all() and look[at.q, at.k].any(1).all() for at in tiles)
    assert (covered[look] == 1).all()
    if normalise == "rms_heads":
        assert len(tiles) == sum(-(-int(look[q0 : q0 + 9].any(0).sum()) // 4) for q0 in range(0, T, 9))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("impl", [impl for impl in ("blocked", "native") if impl in IMPLS["relational"]])
def test_tiles_keep_no_pair_for_the_backward_pass(problem, arguments, impl, offset):
    kept = []
    for t in (32, 64):
        sizes = {}

        def pack(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tensors = arguments("relational", problem(t, t, bias="offset", causal=True)[0], offset=offset)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ops.relational_attention(*tensors, causal=True, relation_act="silu", impl=impl)
        kept.append(sum(sizes.values()))
    assert kept[1] < 2.1 * kept[0]


@pytest.mark.parametrize("impl", [impl for impl in IMPLS["hyla"] if impl not in ("triton", "state")])
def test_half_precision_survives_masked_pairs_and_large_scores(problem, impl):
    """1 / eps is infinite in float16, and so is the square of a score of 1e3."""
    (q, k, v), options = problem(5, 5, mask="rows", dtype=torch.float16, d=4)
    out = ops.hyla(q * 40, k * 40, v, mask=options["mask"], impl=impl)
    exact = ops.hyla(q.double() * 40, k.double() * 40, v.double(), mask=options["mask"], impl="reference")
    assert (out - exact).norm() < 0.01 * exact.norm()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().sum(), (q, k, v)))


@pytest.mark.parametrize(("b", "t", "d"), [(128, 64, 4), (66, 64, 2)])
def test_chunks_of_some_samples_keep_the_gradient_of_values(b, t, d):
    """At sizes that people use; the last chunk of the second is smaller than the others."""
    step = hyla_blocked.tile_sizes(b, d, t, t, d, needs_whole_rows=False)[0]
    assert 1 < step < b
    leaves = [torch.randn(b, t, d, d, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(b, t, d, d, dtype=torch.float64)
    outs = [ops.hyla(*leaves, impl=impl) for impl in ("blocked", "reference")]
    assert_close(*outs, rtol=1e-9, atol=1e-9)
    for x, y in zip(*(torch.autograd.grad(out, leaves, cotangent) for out in outs), strict=True):
        assert (x - y).norm() <= 1e-12 * y.norm()
