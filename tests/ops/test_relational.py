"""Relational attention and relations: loops over explicit indices, causality, memory, the errors."""

import itertools

import compilers
import pytest
import torch
from compilers import READY
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.latent_code import by_offset, visible
from polyhead.ops.relational import blocked as relational_blocked
from polyhead.spec import RELATION_ACTS

IMPLS = [impl for impl in compilers.IMPLS["relational"] if impl != "triton"]
"""Kernels have tests of their own, as their interpreter is slow."""
CASES = list(itertools.product(RELATION_ACTS, (False, True), (None, "rows", "keys", "plane"), (False, True)))


def takes(impl, *, act="identity", offset=False, keep=None):
    """What each impl is for."""
    if impl == "sdpa":
        return act == "identity" and not offset and keep is None
    return impl != "native" or act != "softmax"


@pytest.mark.parametrize(("t", "s"), [(1, 4), (4, 4), (5, 3), (3, 5)])
def test_equals_the_loops(problem, arguments, oracle, t, s):
    torch.manual_seed(t)
    taken = dict.fromkeys(IMPLS, 0)
    for n, (act, offset, mask, causal) in enumerate(CASES):
        bias, keep = (None, "offset", "dense", "per_sample")[(n + n // 4) % 4], n % 3 == 0
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep)
        if (n + t) % 3 == 0:
            continue
        q, k, q_rel, k_rel, symbols, weight = arguments("relational", qkv, offset=offset, r=(1, 3, 8)[n % 3])
        wanted = torch.tensor(oracle(q, k, symbols, **options).relational(q_rel, k_rel, weight, act))
        for impl in IMPLS:
            if takes(impl, act=act, offset=offset, keep=options["keep"]):
                how = {**options, "relation_act": act, "impl": impl}
                out = ops.relational_attention(q, k, q_rel, k_rel, symbols, weight, **how)
                assert_close(out.detach(), wanted, rtol=1e-9, atol=1e-9)
                taken[impl] += 1
    assert min(taken.values()) >= 2


@pytest.mark.parametrize("impl", IMPLS)
def test_grouped_heads_and_scale(problem, arguments, oracle, impl):
    torch.manual_seed(0)
    for g in (1, 2, 4):
        q, k, *rest = arguments("relational", problem(3, 4, g=g, d=5, e=3)[0])
        out = ops.relational_attention(q, k, *rest, scale=-0.3, impl=impl)
        wanted = oracle(q, k, rest[2], scale=-0.3).relational(rest[0], rest[1], rest[3])
        assert_close(out.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("act", RELATION_ACTS)
def test_relations_are_what_their_name_says(problem, arguments, oracle, act):
    torch.manual_seed(1)
    qkv, options = problem(4, 5, mask="rows", causal=True)
    _, _, q_rel, k_rel, *_ = arguments("relational", qkv)
    rel = ops.relations(q_rel, k_rel, relation_act=act, mask=options["mask"], causal=True)
    mine = oracle(*qkv, mask=options["mask"], causal=True)
    wanted = mine.relation(q_rel, k_rel, act, lambda b, r, i, j: any(mine.sees(b, h, i, j) for h in range(4)))
    assert_close(rel.detach(), torch.tensor(wanted), rtol=1e-9, atol=1e-9)
    if act == "softmax":
        sums = rel.sum(-1).detach()
        assert ((sums - 1).abs().lt(1e-9) | (sums == 0)).all()
        assert (rel[0, :, 2] == 0).all()


def test_codes_by_offset():
    code = torch.arange(1.0, 7.0).view(1, 1, 2, 3)
    assert by_offset(code)[0, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("act", RELATION_ACTS)
@pytest.mark.parametrize("offset", [False, True])
def test_what_comes_later_changes_nothing(problem, arguments, impl, act, offset):
    torch.manual_seed(2)
    if not takes(impl, act=act, offset=offset):
        pytest.skip("refused")
    tensors = [x.detach() for x in arguments("relational", problem(6, 6)[0], offset=offset)]
    out = ops.relational_attention(*tensors, causal=True, relation_act=act, impl=impl)
    for x in tensors[:5]:
        x[..., -1, :, :] += 1.0  # the last token; by offset, a key later than the query
    again = ops.relational_attention(*tensors, causal=True, relation_act=act, impl=impl)
    assert_close(again[:, :5], out[:, :5], rtol=0, atol=1e-12)
    assert offset or not torch.allclose(again[:, 5], out[:, 5])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mask", ["rows", "plane"])
def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, arguments, impl, mask):
    torch.manual_seed(0)
    qkv, options = problem(4, 6, mask=mask, bias="offset")
    tensors = arguments("relational", qkv)
    out = ops.relational_attention(*tensors, mask=options["mask"], bias=options["bias"], impl=impl)
    assert (out[0, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), (*tensors, options["bias"]))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, 2] == 0).all()
    assert (grads[2][0, 2] == 0).all()


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("impl", [impl for impl in ("blocked", "native") if impl in IMPLS])
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


@pytest.mark.parametrize(
    "limits", [{"window": 5}, {"causal": True, "window": 9}, {"edges": (0, 5, 6, 20, 48)}], ids=str
)
def test_a_tile_holds_visible_keys_only(monkeypatch, problem, arguments, limits):
    """One piece of the relations at a time, forward and backward."""
    monkeypatch.setattr(relational_blocked, "QUERIES", 8)
    monkeypatch.setattr(relational_blocked, "PAIRS", 8 * 3 * 4)
    qkv, options = problem(48, 48, b=1, **limits)
    look = visible(
        None, options["causal"], 48, 48, qkv[0].device, window=options["window"], cu_seqlens=options["cu_seqlens"]
    )
    pieces, compute = [], relational_blocked.Scores.tile

    def tile(scores, at):
        if scores.bias is None:  # a bias is on the scores, relations have none
            pieces.append(at)
        return compute(scores, at)

    monkeypatch.setattr(relational_blocked.Scores, "tile", tile)
    tensors = arguments("relational", qkv)
    out = ops.relational_attention(*tensors, **{**options, "bias": torch.zeros(4, 95).double()}, impl="blocked")
    forward = len(pieces)
    torch.autograd.grad(out.sum(), tensors[0])
    assert pieces[:forward] == pieces[forward:]
    covered = torch.zeros(48, 48)
    for at in pieces[:forward]:
        covered[at.q, at.k] += 1
    rows = [look[q0 : q0 + 8].any(0).expand(8, 48) for q0 in range(0, 48, 8)]
    assert torch.equal(covered, torch.cat(rows).float())


def test_a_second_derivative_is_refused(problem, arguments):
    tensors = arguments("relational", problem(3, 3)[0])
    out = ops.relational_attention(*tensors, impl="blocked")
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="impl 'blocked' has no second derivative"):
        torch.autograd.grad(grad.sum(), tensors[0])


def wrong(tensors, name, value):
    names = ("q", "k", "q_rel", "k_rel", "symbols", "relation_weight")
    return {**dict(zip(names, tensors, strict=True)), name: value}


def test_mistakes_are_one_clear_line(problem, arguments):
    qkv, _ = problem(3, 4)
    tensors = arguments("relational", qkv)
    for name, value, told in [
        ("symbols", torch.zeros(2, 3, 2, 5), r"s = 4 in k but 3 in symbols \(b s g e\) = \(2, 3, 2, 5\)"),
        ("symbols", torch.zeros(7, 2, 5), r"t\+s-1 = 6 but 7 in symbols \(t\+s-1 g e\) = \(7, 2, 5\)"),
        ("symbols", torch.zeros(3, 4), r"symbols must be \(b s g e\) or \(t\+s-1 g e\) but has shape \(3, 4\)"),
        ("relation_weight", torch.zeros(4, 5, 2), r"r = 3 in q_rel but 2 in relation_weight \(h e r\) = \(4, 5, 2\)"),
        ("relation_weight", torch.zeros(3, 5, 3), r"h = 4 in q but 3 in relation_weight \(h e r\) = \(3, 5, 3\)"),
        ("k_rel", torch.zeros(2, 4, 3, 1), r"p = 2 in q_rel but 1 in k_rel \(b s r p\) = \(2, 4, 3, 1\)"),
    ]:
        with pytest.raises(ValueError, match=f"^relational_attention: {told}$"):
            ops.relational_attention(**wrong(tensors, name, value))
    with pytest.raises(
        ValueError, match=r"^relational_attention: mask must be boolean, True where attention is allowed,"
    ):
        ops.relational_attention(*tensors, mask=torch.zeros(3, 4))
    for impl, options, told in [
        *([("native", {"relation_act": "softmax"}, "impl 'native' takes no relation_act='softmax'")] if READY else []),
        ("sdpa", {"relation_act": "tanh"}, "impl 'sdpa' takes relation_act='identity' only, not 'tanh'"),
        ("sdpa", {"keep": torch.ones(1, 1, 3, 4).double()}, "impl 'sdpa' takes no keep"),
    ]:
        with pytest.raises(ValueError, match=f"^relational_attention: {told}; use impl='auto' or 'reference'$"):
            ops.relational_attention(*tensors, **options, impl=impl)
    with pytest.raises(ValueError, match=r"impl 'sdpa' takes symbols by key only; use"):
        ops.relational_attention(*arguments("relational", qkv, offset=True), impl="sdpa")
    for impl in ("auto", *IMPLS):
        with pytest.raises(ValueError, match="unknown relation_act 'sigmiod'; did you mean 'sigmoid'"):
            ops.relational_attention(*tensors, relation_act="sigmiod", impl=impl)
