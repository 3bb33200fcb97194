"""NaN and infinite numbers that a query may see are never lost, in every impl of every op; see docs/promises.md.

The oracle is the reference of every query alone, with the keys that it sees.  So NaN goes exactly where it must.
"""

import itertools

import pytest
import torch
from problems import make_arguments, make_problem
from rules import ALL, REQUIRED_OPTIONS, options_of_scores, output_and_gradients
from some import some

from polyhead.ops import linear_step, softmax_attention
from polyhead.ops.call import Masks
from polyhead.ops.latent_code import dense
from polyhead.ops.registry import TENSORS, resolve
from polyhead.ops.textbook import scaled_dot_product_attention
from polyhead.spec import ACTS, RELATION_ACTS

OF_QUERIES, OF_KEYS = ("q", "q_rel"), ("k", "v", "k_rel", "symbols")
NEGATIVE = torch.tensor(float("nan")).copysign(torch.tensor(-1.0)).item()
VALUES = (float("nan"), NEGATIVE, float("inf"), -float("inf"))
"""NaN has a sign, and arithmetic makes negative ones.  With infinite numbers every head has keys of its own: sums over
heads that come first would give other results."""
SIZES = ((3, 20), (17, 18), (9, 21))
"""Few queries, many, and lengths that fill no vector."""

pytestmark = pytest.mark.usefixtures("small_tiles")


def query_by_query(op, tensors, options):
    """Output (t h e) of the last sample, and its part of the gradients of all arguments and of the bias."""
    tensors_by_name = dict(zip(TENSORS[op], tensors, strict=True))
    (b, t), s = tensors_by_name["q"].shape[:2], tensors_by_name["k"].shape[1]
    bias = options["bias"]
    visible = Masks(options["mask"], options["causal"], options["window"]).visible(t, s, tensors[0].device)
    if visible is None:
        visible = torch.ones(t, s, dtype=torch.bool)
    limits = ("mask", "causal", "window", "bias", "cu_seqlens")
    other_options = {name: x for name, x in options.items() if name not in limits}
    outs = []
    for i, keys in enumerate(visible.expand(b, 1, t, s)[-1, 0]):
        slices = dict(tensors_by_name)
        slices |= {name: x[-1:, i : i + 1] for name, x in tensors_by_name.items() if name in OF_QUERIES}
        slices |= {name: x[-1:, keys] for name, x in tensors_by_name.items() if name in OF_KEYS}
        bias_row = None if bias is None else dense(bias, t, s)[None, ..., i : i + 1, keys]
        outs.append(resolve(op, "reference")(*slices.values(), bias=bias_row, **other_options)[0, 0])
    out = torch.stack(outs)
    return [out, *torch.autograd.grad(out.sum(), [*tensors, *([] if bias is None else [bias])])]


def functions(op, impl):
    """All normalisers and activations that may treat NaN in a way of their own."""
    if op == "hyla" and impl in ("native", "blocked"):
        return [{**extra, "act": act} for extra in options_of_scores(op, impl) for act in ACTS]
    if (op, impl) == ("hyla", "triton"):
        return [{"normalise": n, "act": a} for n in ("rms_heads", "identity") for a in ("relu", "identity")]
    if op == "relational":
        return [{"relation_act": act} for act in RELATION_ACTS]
    return options_of_scores(op, impl)


def limited(n, impl):
    """The limits of the n-th case."""
    if impl == "triton":
        return {"causal": True, **({"bias": "offset"} if n % 2 else {})}
    return ({}, {"causal": True}, {"mask": "keys"}, {"window": 4}, {"bias": "offset"}, {"mask": "plane"})[n % 6]


def spoilt(x, n, value):
    """A copy with one number that is not finite, of the last sample or head."""
    x = x.detach().clone()
    at = [(7 * n + 3 * i) % size for i, size in enumerate(x.shape)]
    x[-1, *at[1:]] = value
    return x.requires_grad_()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter
@pytest.mark.parametrize(("op", "impl"), ALL)
def test_what_a_query_sees_is_never_lost(op, impl):
    num_accepted, num_compared = 0, 0
    sizes, values = (SIZES[:1], VALUES[:2]) if impl == "triton" else (SIZES, VALUES)
    cases = list(itertools.product(functions(op, impl), values, (*TENSORS[op], "bias")))
    # A step that shares no factor with the numbers of sizes, limits, values and arguments: all of them are met.
    slow = impl in ("triton", "blocked")
    if slow and len(cases) > 70:
        step = 11
    elif slow or len(cases) > 100:
        step = 5
    else:
        step = 1
    for n, (extra, value, name) in some(list(enumerate(cases))[::step]):
        (t, s), options = sizes[n % len(sizes)], {**extra, **REQUIRED_OPTIONS.get(impl, {})}
        limits = {**limited(n, impl), **({"bias": "offset"} if name == "bias" else {})}
        qkv, limit_options = make_problem(t, s, g=4 if value in VALUES[2:] else 2, dtype=torch.float32, **limits)
        options = limit_options | options
        tensors = make_arguments(op, qkv)
        if name == "bias":
            options["bias"] = spoilt(options["bias"], n, value if value != -float("inf") else float("nan"))
        else:
            tensors[TENSORS[op].index(name)] = spoilt(tensors[TENSORS[op].index(name)], n, value)
        expected = query_by_query(op, tensors, options)
        cotangent = torch.ones(2, *expected[0].shape)
        biases = [] if options["bias"] is None else [options["bias"]]
        try:
            actual = output_and_gradients(op, impl, tensors, options, cotangent, biases)
        except ValueError as error:
            assert "takes" in str(error) or "needs" in str(error)  # noqa: PT017
            continue
        # PyTorch's own kernel gives an infinite score the weight 0 in its gradients; its output is NaN, too.
        actual[0] = actual[0][-1]
        for number, (x, y) in enumerate(list(zip(actual, expected, strict=True))[: 1 if impl == "sdpa" else None]):
            is_lost = y.isnan() & x.isfinite()
            assert not is_lost.any(), (extra, name, value, limits, (t, s), number, is_lost.nonzero()[0].tolist())
            num_compared += y.isnan().any().item()
        num_accepted += 1
    assert num_accepted
    assert 2 * num_compared > num_accepted


@pytest.mark.parametrize(("op", "impl"), [(op, impl) for op, impl in ALL if impl in ("native", "blocked", "sdpa")])
def test_a_bias_that_hides_other_pairs_loses_no_nan(op, impl):
    torch.manual_seed(0)
    for t in (3, 20):  # few queries, and many
        qkv, options = make_problem(t, 6, bias="dense", dtype=torch.float32)
        tensors, bias = make_arguments(op, qkv), options["bias"].detach()
        bias[..., 0, 1], bias[..., 1, 0] = torch.nan, -torch.inf
        actual, expected = (resolve(op, name)(*tensors, bias=bias).isnan() for name in (impl, "reference"))
        assert expected[:, 0].any()
        assert actual.equal(expected)


@pytest.mark.parametrize("s", [1, 5, 15, 16])
@pytest.mark.parametrize("limit", [{}, {"causal": True}, {"mask": torch.tensor([True] + [False] * 3)[:, None]}])
def test_a_query_with_no_score_but_nan(s, limit):
    """PyTorch's kernel gives 0 to it if it has fewer keys than a vector register.  Other queries are not touched."""
    t, limit = 4 if "causal" not in limit else s, dict(limit)
    for spoilt_keys in (False, True):
        q, k, v = (torch.randn(2, n, 2, 3) for n in (t, s, s))
        row = k[1] if spoilt_keys else q[1, 0]
        row[:] = float("nan")
        q.requires_grad_()
        actual = softmax_attention(q, k, v, impl="sdpa", **limit)
        expected = softmax_attention(q, k, v, impl="reference", **limit)
        assert actual.isnan().equal(expected.isnan())
        assert expected[1, 0].isnan().all()
        assert torch.autograd.grad(actual.sum(), q)[0][1, 0].isnan().all()
    visible = torch.ones(t, s, dtype=torch.bool)
    q, k, v = (x[:, :, 0].detach() for x in (q, k, v))
    assert scaled_dot_product_attention(q, k, v, visible).isnan().any(-1).all(-1).tolist() == [False, True]


def test_a_query_without_a_key_gets_0_beside_a_sink_of_minus_infinity_and_if_it_is_nan():
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    limits = {"mask": torch.tensor([False, False, True, True]), "causal": True}
    sinks = torch.tensor([-torch.inf, 0.0], requires_grad=True)
    with_sinks = softmax_attention(q, k, v, **limits, sinks=sinks)
    assert torch.autograd.grad(with_sinks.sum(), sinks)[0].isfinite().all()
    q[:, :2] = torch.nan
    outs = [resolve("linear", impl)(q, k, v, **limits) for impl in ("reference", "chunked")]
    outs.append(linear_step(q, k, v, mask=limits["mask"])[0])
    for out in (with_sinks, *outs):
        assert (out[:, :2] == 0).all()


@pytest.mark.parametrize(
    ("op", "options"),
    [("softmax", {}), ("hyla", {"normalise": "softmax"}), ("hyla", {"normalise": "softmax_rms_heads"})],
)
def test_a_packed_sequence_that_overflows_leaves_the_gradients_of_others_alone(op, options):
    q, k, v = torch.randn(3, 1, 40, 2, 3)
    q[0, 5] = k[0, 6] = 1e20
    edges = torch.tensor([0, 20, 40], dtype=torch.int32)
    results = []
    for impl in ("reference", "native"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        loss = resolve(op, impl)(*leaves, cu_seqlens=edges, **options)[:, 20:].square().sum()
        results.append([grad[:, 20:] for grad in torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
