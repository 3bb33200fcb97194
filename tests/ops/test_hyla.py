"""HYLA against loops over explicit indices, and all mechanisms against the original code's numbers."""

import itertools
import json
import pathlib

import compilers
import numpy as np
import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.hyla import blocked as hyla_blocked
from polyhead.ops.latent_code import visible
from polyhead.spec import ACTS, NORMALISE

IMPLS = [impl for impl in compilers.IMPLS["hyla"] if impl not in ("triton", "state")]
"""Kernels have tests of their own, as their interpreter is slow."""
CASES = list(
    itertools.product(
        (None, "offset", "dense", "per_sample"), (None, "rows", "keys", "plane"), (False, True), (False, True)
    )
)
FILES = sorted((pathlib.Path(__file__).parents[1] / "fixtures").glob("hyla_attn_small_*.npz"))


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("shift", [0, pytest.param(8, marks=pytest.mark.campaign)])
def test_equals_the_loops(problem, oracle, normalise, act, deep, shift):
    torch.manual_seed(0)
    weight = torch.randn(4, 5, 5, dtype=torch.float64) if deep else None
    start = len(ACTS) * NORMALISE.index(normalise) + ACTS.index(act) + 5 * deep + shift
    for (t, s), case in some(
        zip(itertools.cycle([(1, 4), (4, 4), (4, 3), (3, 4)]), CASES[start % 16 :: 16], strict=False)
    ):
        bias, mask, causal, keep = case
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep, e=5)
        wanted = torch.tensor(oracle(*qkv, **options).networks(normalise, act, weight))
        for impl in ("auto", *(impl for impl in IMPLS if not deep or impl != "native")):
            out = ops.hyla(*qkv, **options, normalise=normalise, act=act, value_weight=weight, impl=impl)
            assert_close(out.detach(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, impl, normalise, act):
    torch.manual_seed(0)
    qkv, options = problem(4, 6, mask="rows", bias="offset")
    weight = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True) if impl != "native" else None
    out = ops.hyla(*qkv, **options, normalise=normalise, act=act, value_weight=weight, impl=impl)
    assert (out[0, 2] == 0).all()
    leaves = (*qkv, options["bias"], *(() if weight is None else (weight,)))
    grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, 2] == 0).all()


def test_the_code_is_blind_to_the_size_of_the_scores(problem):
    """rms over heads divides a common factor out (up to eps)."""
    torch.manual_seed(0)
    (q, k, v), _ = problem(4, 4, d=8)
    assert_close(ops.hyla(q, 7 * k, v), ops.hyla(q, k, v), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(ops.hyla(q, 7 * k, v, normalise="identity"), ops.hyla(q, k, v, normalise="identity"))


def test_half_precision_survives_masked_pairs_and_large_scores(problem):
    """1 / eps is infinite in float16, and so is the square of a score of 1e3."""
    torch.manual_seed(0)
    (q, k, v), options = problem(5, 5, mask="rows", dtype=torch.float16, d=4)
    for impl in some(IMPLS):
        out = ops.hyla(q * 40, k * 40, v, mask=options["mask"], impl=impl)
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in grads)


def test_under_autocast_every_impl_works_in_its_dtype(problem):
    torch.manual_seed(0)
    (q, k, v), _ = problem(5, 5, dtype=torch.float32)
    exact = ops.hyla(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for impl in some(IMPLS):
            out = ops.hyla(q, k, v, impl=impl)
            assert_close(out.float(), exact, rtol=0.1, atol=0.1)


def test_a_second_derivative_is_refused_by_the_tiles(problem):
    (q, k, v), _ = problem(3, 3)
    (grad,) = torch.autograd.grad(ops.hyla(q, k, v, impl="blocked").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"hyla: impl 'blocked' has no second derivative; use impl='reference'"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(ops.hyla(q, k, v, impl="reference").sum(), q, create_graph=True)
    grad.square().sum().backward()


LIMITS = [{}, {"causal": True}, {"window": 5}, {"causal": True, "window": 9}]
LIMITS += [{"edges": (0, 5, 6, 20, 48), **x} for x in ({}, {"causal": True, "window": 7})]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("normalise", ["rms_heads", "softmax"])
def test_a_tile_without_a_visible_pair_is_never_computed(monkeypatch, problem, normalise, limits):
    monkeypatch.setattr(hyla_blocked, "QUERIES", 9)
    monkeypatch.setattr(hyla_blocked, "KEYS", 4)
    (q, k, v), options = problem(48, 48, b=1, **limits)
    look = visible(
        None, options["causal"], 48, 48, q.device, window=options["window"], cu_seqlens=options["cu_seqlens"]
    )
    look = torch.ones(48, 48, dtype=torch.bool) if look is None else look
    seen, compute = [], hyla_blocked.Scores.tile

    def tile(scores, at):
        seen.append(at)
        return compute(scores, at)

    monkeypatch.setattr(hyla_blocked.Scores, "tile", tile)
    out = ops.hyla(q, k, v, **options, normalise=normalise, impl="blocked")
    forward = len(seen)
    torch.autograd.grad(out.sum(), q)
    assert seen[:forward] == seen[forward:]
    covered = torch.zeros(48, 48)
    for at in seen[:forward]:
        assert look[at.q, at.k].any(0).all()
        assert look[at.q, at.k].any(1).all()
        covered[at.q, at.k] += 1
    assert (covered[look] == 1).all()
    if normalise == "rms_heads":
        needed = sum(-(-int(look[q0 : q0 + 9].any(0).sum()) // 4) for q0 in range(0, 48, 9))
        assert forward == needed


def test_mistakes_are_one_clear_line(problem):
    (q, k, v), _ = problem(3, 3)
    cases = [
        ({"act": "rleu"}, "unknown act 'rleu'; did you mean 'relu'?"),
        ({"normalise": "rms_head"}, "unknown normalise 'rms_head'; did you mean 'rms_heads'?"),
        ({"impl": "block"}, "unknown impl 'block'; did you mean 'blocked'?"),
        ({"value_weight": q.new_zeros(4, 5, 4)}, "e = 5 in v but 4 in value_weight (h e e) = (4, 5, 4)"),
    ]
    for extra, text in cases:
        with pytest.raises(ValueError, match=r"^[a-z_.]+: ") as caught:
            ops.hyla(q, k, v, **extra)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------- the original code's layer
def original(file, impl, by_offset):
    """The layer of a fixture on our op: output, code, and its parameters as leaves."""
    data = np.load(file)
    meta = json.loads(str(data["meta"])) if "meta" in data else {}
    norms = {"softmax": "softmax", "rms_head": "rms_heads", "none": "identity"}
    leaves = {
        n.removeprefix("param/"): torch.tensor(data[n], requires_grad=True) for n in data if n.startswith("param/")
    }
    x = leaves["x"] = torch.tensor(data["x"], requires_grad=True)
    q, k, v = (
        torch.einsum("btm,mhd->bthd", x, leaves[f"{n}/kernel"]) + leaves[f"{n}/bias"] for n in ("query", "key", "value")
    )
    bias = torch.tensor(data["attention_bias"])
    if by_offset:
        t = x.shape[1]
        i, j = torch.tensor([(max(0, t - 1 - n), max(0, n - t + 1)) for n in range(2 * t - 1)]).T
        bias = bias[0, :, i, j]
    options = {
        "bias": bias,
        "mask": torch.tensor(data["mask"]) if "mask" in data else None,
        "normalise": norms[meta.get("attention_norm", "rms_head")],
    }
    code = ops.latent_code(q, k, **options)
    keep = torch.tensor(data["keep_mask"]).float() / 0.9 if "keep_mask" in data else None
    target, extra = meta.get("target_network", "mlp_relu"), {}
    if target == "default":
        op = {"softmax": ops.softmax_attention}.get(options["normalise"], ops.linear_attention)
        if op is ops.softmax_attention:
            del options["normalise"]
    else:
        op, extra = ops.hyla, {"act": {"mlp_relu": "relu", "mlp_linear": "identity"}[target], "impl": impl}
    if "value2_kernel" in data:
        extra["value_weight"] = torch.tensor(data["value2_kernel"]).mT  # stored [head, in, out]
    out = op(q, k, v, keep=keep, **options, **extra)
    return torch.einsum("bthe,hem->btm", out, leaves["out/kernel"]) + leaves["out/bias"], code, leaves, data


@pytest.mark.parametrize("by_offset", [False, True], ids=["dense", "offset"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem.removeprefix("hyla_attn_small_"))
def test_the_original_layer(file, impl, by_offset):
    if impl == "native" and "deepvalue" in file.stem:
        pytest.skip("native code takes no value_weight")
    out, code, leaves, data = original(file, impl, by_offset)
    assert_close(out.detach(), torch.tensor(data["out"]), rtol=1e-5, atol=1e-5)
    if "attn_weights" in data:
        assert_close(code.detach(), torch.tensor(data["attn_weights"]), rtol=1e-5, atol=1e-5)
    else:
        dropped = code * torch.tensor(data["keep_mask"]).float() / 0.9
        assert_close(dropped.detach(), torch.tensor(data["attn_weights_after_dropout"]), rtol=1e-5, atol=1e-5)
    if "cotangent" not in data:
        return
    out.backward(torch.tensor(data["cotangent"]))
    for name, leaf in leaves.items():
        wanted = torch.tensor(data["grad_x" if name == "x" else f"grad/{name}"])
        assert_close(leaf.grad, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().clamp(min=1).item())


def test_all_fixtures_are_there():
    assert len(FILES) == 19
