"""Which tiles of pairs are computed, what is saved for the backward pass, large scores in float16."""

import pytest
import torch
from compilers import IMPLS

from polyhead import ops
from polyhead.ops import tiling
from polyhead.ops.call import AttentionCall, Masks

T = 48
LIMITS = [{}, {"causal": True}, {"window": 5}, {"causal": True, "window": 9}]
LIMITS += [{"edges": (0, 5, 6, 20, T), **x} for x in ({}, {"causal": True, "window": 7})]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("normalise", ["rms_heads", "softmax"])
def test_a_tile_without_a_visible_query_is_never_computed(monkeypatch, problem, normalise, limits):
    """Each visible pair is in one tile, in both passes."""
    monkeypatch.setattr(tiling, "QUERIES", 9)
    monkeypatch.setattr(tiling, "KEYS", 4)
    (q, k, v), options = problem(T, T, b=1, **limits)
    masks = Masks(options["mask"], options["causal"], options["window"], options["cu_seqlens"])
    call = AttentionCall(q, k, v, masks=masks, normalise=normalise)
    visible = call.visible()
    if visible is None:
        visible = torch.ones(T, T, dtype=torch.bool)
    covered = torch.zeros(T, T)
    for _, at, _ in tiling._tiles(call):
        assert visible[at.q, at.k].any()
        covered[at.q, at.k] += 1
    assert (covered[visible] == 1).all()


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("impl", [impl for impl in ("blocked", "native") if impl in IMPLS["relational"]])
def test_tiles_keep_no_pair_for_the_backward_pass(problem, arguments, impl, offset):
    saved_bytes = []
    for t in (32, 64):
        sizes = {}

        def pack(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tensors = arguments("relational", problem(t, t, bias="offset", causal=True)[0], offset=offset)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ops.relational_attention(*tensors, causal=True, relation_act="silu", impl=impl)
        saved_bytes.append(sum(sizes.values()))
    assert saved_bytes[1] < 2.1 * saved_bytes[0]
