"""Every function of jaxside, in tiles and without, against the reference of ops in torch: output and every gradient.

Every case is a program that JAX compiles, so they are few.
"""

import functools
import sys

import numpy as np
import pytest
import torch
from problems import make_arguments, make_problem

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside, spec  # noqa: E402
from polyhead.jaxside import tiles  # noqa: E402
from polyhead.ops.registry import OPS as TORCH_OPS, TENSORS, resolve  # noqa: E402

OPS = {op.name: folder for folder, op in TORCH_OPS.items()}
CASES = {
    "offset": {
        "size": (5, 5), "limits": {"bias": "offset", "mask": "rows", "causal": True, "keep": True},
        "groups": 2, "symmetric": True, "scale": 0.3,
    },
    "per sample": {
        "size": (4, 9), "limits": {"bias": "per_sample", "mask": "keys", "window": 2, "keep": True},
        "groups": 4, "by_offset": True,
    },
    "packed": {
        "size": (5, 5), "limits": {"bias": "dense", "mask": "plane", "causal": True, "edges": (0, 2, 2, 5)},
        "groups": 1, "by_offset": True, "value_weight": True,
    },
}  # fmt: skip
OPTIONS = {
    "offset": {"normalise": "softmax", "act": "silu", "relation_act": "softmax", "pool": "mean", "network": "query"},
    "per sample": {"normalise": "softmax_rms_heads", "act": "relu", "relation_act": "gelu"},
    "packed": {"normalise": "softmax_heads", "act": "identity", "relation_act": "tanh", "pool": "sum"},
}
"""Cases, and the choices of every op that has the option; test_parts.py has all choices of codes and relations."""


def to_jax(x):
    """A tensor as an array of JAX; anything else as it is."""
    return jnp.asarray(x.detach().numpy()) if isinstance(x, torch.Tensor) else x


@functools.cache
def program(op, impl, order, static, tile):
    """Output and gradients, compiled; tests that differ in numbers alone share it.  `tile` is that of its tiles."""

    def output_and_gradients(arrays, learned, fixed, cotangent):
        def function(arrays, learned):
            return getattr(jaxside, op)(*(arrays[i] for i in order), **learned, **fixed, **dict(static), impl=impl)

        out, vjp = jax.vjp(function, arrays, learned)
        return out, vjp(cotangent)

    return jax.jit(output_and_gradients)


def run_in_jax(op, impl, tensors, options, cotangent):
    """The same in JAX; `symmetric` relations are one array twice, whose gradient is a sum."""
    learned = {n: to_jax(x) for n, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    fixed = {n: to_jax(x) for n, x in options.items() if n not in learned and isinstance(x, torch.Tensor)}
    static = tuple((n, x) for n, x in options.items() if n not in learned and n not in fixed)
    distinct = list({id(x): x for x in tensors}.values())
    order = tuple(next(i for i, y in enumerate(distinct) if x is y) for x in tensors)
    compiled = program(op, impl, order, static, tiles.TILE)
    out, (arrays, learned) = compiled([to_jax(x) for x in distinct], learned, fixed, to_jax(cotangent))
    return [np.asarray(x) for x in (out, *(arrays[i] for i in order), *learned.values())]


@pytest.mark.usefixtures("x64", "small_tiles")
@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", OPS)
def test_output_and_gradients_are_those_of_torch(op, name, impl):
    case = CASES[name]
    torch.manual_seed(0)
    t, s = case["size"]
    qkv, options = make_problem(t, s, g=case["groups"], **case["limits"])
    row = spec.mechanism(op)
    offset = row.reads_symbols and case.get("by_offset", False)
    tensors = make_arguments(OPS[op], qkv, offset=offset, symmetric=case.get("symmetric", False))
    if row.optional and case.get("value_weight"):
        options["value_weight"] = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
    if "scale" in case:
        options["scale"] = case["scale"]
    for option in row.options:
        if option in OPTIONS[name]:
            options[option] = OPTIONS[name][option]

    out = resolve(OPS[op], "reference")(*tensors, **options)
    leaves = [*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    results = run_in_jax(op, impl, tensors, options, cotangent)
    expected = [x.numpy() for x in (out.detach(), *torch.autograd.grad(out, leaves, cotangent))]
    for x, y in zip(results, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.abs(x - y).max() <= 1e-12 * max(1.0, np.abs(y).max())
    if name == "offset":  # one query of the first sample sees no key
        assert (results[0][0, t // 2] == 0).all()
    if name == "packed":  # one query of every sample
        assert (results[0][:, t // 2] == 0).all()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_window_of_any_width(impl):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4)).astype("float32")
    actual = jaxside.hyla(q, k, v, window=sys.maxsize, impl=impl)
    np.testing.assert_allclose(actual, jaxside.hyla(q, k, v), rtol=1e-5, atol=1e-6)


POOLED = [("pair", "max"), ("query", "max"), *(("sequence", pool) for pool in spec.POOLS)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("network", "pool"), POOLED)
def test_equal_keys_share_the_gradient_of_a_maximum_and_a_sequence_has_its_network(network, pool):
    limits = {"mask": "rows", "keep": True} if network == "sequence" and pool != "max" else {}
    tensors, options = make_problem(3, 4, **limits)
    tensors = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        for x in tensors[1:]:
            x[:, 2] = x[:, 1]
    options |= {"network": network, "pool": pool}
    out = resolve("pooled", "reference")(*tensors, **options)
    results = run_in_jax("pooled_attention", "reference", tensors, options, torch.ones_like(out))
    for x, y in zip(results, (out.detach(), *torch.autograd.grad(out.sum(), tensors)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------- the rules of tests/ops/test_rules.py
SENDERS = ("k", "v", "k_rel", "symbols")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("op", "impl"),
    [
        ("hyla", "reference"),
        ("disentangled_attention", "reference"),
        ("softmax_attention", "blocked"),
        ("pooled_attention", "blocked"),
        ("relational_attention", "blocked"),
    ],
)
def test_what_is_hidden_counts_for_nothing(op, impl):
    """Two keys of sample 0 are NaN behind a mask; of a bias by offset some are -inf, for query 0 of sample 0 all."""
    qkv, options = make_problem(4, 5, mask="keys", bias="offset", dtype=torch.float32)
    mask, bias = options["mask"], options["bias"].detach()
    mask[0, ..., [1, 3]] = False
    bias[:, 3:] = bias[0, 1] = -torch.inf
    visible = torch.stack([bias[:, 3 - i : 8 - i] for i in range(4)], 1) > -torch.inf
    hidden = ~mask[:, 0, 0, :, None, None]
    named_tensors = list(zip(TENSORS[OPS[op]], make_arguments(OPS[op], qkv), strict=True))
    spoilt, zeros = (
        [x.masked_fill(hidden, fill) if name in SENDERS else x for name, x in named_tensors] for fill in (torch.nan, 0)
    )
    finite, cotangent = bias.masked_fill(bias == -torch.inf, 0).requires_grad_(), torch.randn(2, 4, 4, 5)
    extra = {"relation_act": "softmax"} if "relation_act" in spec.mechanism(op).options else {}
    actual = run_in_jax(op, impl, spoilt, {"bias": bias.requires_grad_(), "mask": mask, **extra}, cotangent)
    expected = run_in_jax(op, "reference", zeros, {"bias": finite, "mask": mask & visible, **extra}, cotangent)
    for x, y in zip(actual, expected, strict=True):
        assert np.abs(x - y).max() <= 1e-5
    assert (actual[0][:, 0] == 0).all()


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
def test_a_bias_that_all_keys_of_a_query_share_changes_no_softmax(low):
    """A log-sum-exp would lose the sum; with the least number, hidden keys must not count like visible ones."""
    qkv, options = make_problem(6, 7, dtype=torch.float32, causal=True)
    with torch.no_grad():
        qkv[0].zero_()  # else -1e9 would round the scores
    options |= {"normalise": "softmax"}
    cotangent, bias = torch.randn(2, 6, 4, 5), torch.zeros(2, 1, 6, 7)
    bias[1, :, 2] = low
    actual = run_in_jax("hyla", "blocked", qkv, options | {"bias": bias}, cotangent)
    for x, y in zip(actual, run_in_jax("hyla", "reference", qkv, options, cotangent), strict=True):
        assert np.abs(x - y).max() <= 1e-5


@pytest.mark.parametrize("op", ["hyla", "softmax_attention"])
def test_nothing_comes_of_nothing(op):
    for b, t, s in (0, 3, 4), (2, 0, 3), (2, 3, 0):
        tensors = make_problem(t, s, b=b, dtype=torch.float32)[0]
        for bias in ({}, {"bias": torch.ones(4, t + s - 1, requires_grad=True)}):
            out, *grads = run_in_jax(op, "blocked", tensors, bias, torch.ones(b, t, 4, 5))
            leaves = [*tensors, *bias.values()]
            assert out.shape == (b, t, 4, 5)
            assert (out == 0).all()
            assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads, leaves, strict=True))


@pytest.mark.usefixtures("small_tiles", "x64")
def test_tiles_have_forward_mode_and_second_derivatives():
    """Hessian-vector products, which are forward over reverse."""
    q, k, v = (x.detach().numpy() for x in make_problem(4, 4)[0])

    def products(impl):
        def loss(q):
            return jnp.sin(jaxside.hyla(q, k, v, causal=True, normalise="softmax", impl=impl)).sum()

        return jax.jvp(jax.grad(loss), (q,), (q,))

    for tiled, exact in zip(products("blocked"), products("reference"), strict=True):
        np.testing.assert_allclose(tiled, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", ["code", "relations"])
def test_codes_know_nothing_of_hidden_keys(function):
    mask = np.array([True, True, False, True])
    q, k = np.random.default_rng(0).standard_normal((2, 1, 4, 2, 3)).astype(np.float32)

    def run(q, k):
        if function == "code":
            return jaxside.latent_code(q, k, normalise="rms_heads", mask=mask)
        return jaxside.relations(q, k, relation_act="softmax", mask=mask)

    results = []
    for fill in (np.nan, 0):
        spoilt = np.where(mask[:, None, None], k, np.float32(fill))
        out, vjp = jax.vjp(run, q, spoilt)
        results.append([out, *vjp(np.ones_like(out))])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("network", ["pair", "query"])
def test_a_mean_over_keys_is_finite_where_their_sum_is_not(network):
    """The largest number of float16 is 65,504."""
    q, k = jnp.ones((1, 1, 2, 4), "float16"), jnp.ones((1, 4096, 2, 4), "float16")
    y = jaxside.pooled_attention(q, k, 20 * k, pool="mean", network=network, impl="reference")
    assert (y == 40).all()


VISIBLE = np.arange(33)[:, None] != np.full(33, 2)
HALF = {
    "softmax": lambda q, k, v: jaxside.softmax_attention(q, k, v, mask=VISIBLE),
    "hyla": lambda q, k, v: jaxside.hyla(q, k, v, mask=VISIBLE, impl="blocked"),
    # Rms over one head keeps the sign of a score, also of one near 0; 8 ** -0.5 is no number of bfloat16.
    "scale, reference": lambda q, k, v: jaxside.hyla(q[:, :, :1], k[:, :, :1], v[:, :, :1], impl="reference"),
    "scale, blocked": lambda q, k, v: jaxside.hyla(q[:, :, :1], k[:, :, :1], v[:, :, :1], impl="blocked"),
    "relations": lambda q, k, v: jaxside.relations(q, k, relation_act="softmax"),
    "disentangled": lambda q, k, v: jaxside.disentangled_attention(v, v, q, k, v, relation_act="softmax"),
    "relational": lambda q, k, v: jaxside.relational_attention(
        v, v, q, k, v, jnp.ones((4, 8, 4), v.dtype), impl="reference", relation_act="softmax"
    ),
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_rounds_neither_queries_nor_large_relations(name):
    exact = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 33, 4, 8)), "bfloat16").at[:2].mul(6)
    actual, expected = (HALF[name](*exact.astype(dtype)) for dtype in ("bfloat16", "float32"))
    assert actual.dtype == "bfloat16"
    assert abs(actual.astype("float32") - expected).max() < 0.01 * abs(expected).max()
    if name in ("softmax", "hyla"):
        slope = jax.grad(lambda q: HALF[name](q, *exact[1:]).astype("float32").sum())(exact[0])
        assert jnp.isfinite(slope).all()
        assert not actual[:, 2].any()
        assert not slope[:, 2].any()
