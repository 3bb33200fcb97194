"""Every function of jaxside against the reference of ops, in torch: output and every gradient, over all options.

The grid is the table of mechanisms'.  Every case is a program that JAX compiles, so they are few, and each op's
together take every option.
"""

import types

import numpy as np
import pytest
import torch
from problems import make_arguments, make_problem
from some import some

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside, spec  # noqa: E402
from polyhead.jaxside import tiles  # noqa: E402
from polyhead.jaxside.call import AttentionCall  # noqa: E402
from polyhead.ops.dispatch import PUBLIC, resolve  # noqa: E402

OPS = {name: op for op, name in PUBLIC.items()}
SIZES, BIASES, MASKS = (
    [(7, 4), (5, 5), (1, 6), (4, 9)],
    (None, "offset", "dense", "per_sample"),
    (None, "rows", "keys", "plane"),
)
LIMITS = [(None, None), (2, None), (None, (0, 2, 2, 5)), (None, None), (3, (0, 1, 5))]
"""Window, and edges of packed sequences in a single sample."""


def cases(op):
    """Sizes and options in changing combinations, and all choices of the op."""
    row, shift = spec.mechanism(op), list(OPS).index(op)
    count = max([6, *map(len, row.choices.values())]) + (4 if row.optional else 0)
    for n in range(count):
        window, edges = LIMITS[n % 5]
        case = {
            "size": SIZES[(0, 1, 1, 2, 1, 3)[n % 6] + shift & 3] if edges is None else (5, 5),
            "window": window,
            "edges": edges,
        }
        case |= {"bias": BIASES[(n + shift) % 4], "mask": MASKS[(n // 4 + 3 * n + shift) % 4]}
        case |= {"causal": (n // 2 + shift) % 2 == 0, "keep": (n // 3) % 2 == 0}
        names = list(row.options)
        yield (
            types.SimpleNamespace(**case),
            {x: row.choices[x][n * (1, 2, 5, 3)[i] % len(row.choices[x])] for i, x in enumerate(names)},
        )


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def here(x):
    """A tensor as an array of JAX; anything else as it is."""
    return jnp.asarray(x.detach().numpy()) if isinstance(x, torch.Tensor) else x


def problem(op, case, n, dtype=torch.float64):
    """Arguments, options and the gradient of the output."""
    torch.manual_seed(n)
    t, s = case.size
    how = {"bias": case.bias, "mask": case.mask, "causal": case.causal, "window": case.window, "edges": case.edges}
    qkv, options = make_problem(t, s, keep=case.keep, g=(2, 4, 1)[n % 3], dtype=dtype, **how)
    row = spec.mechanism(op)
    tensors = make_arguments(OPS[op], qkv, offset=row.reads_symbols and n % 2 == 0, symmetric=n % 3 == 0)
    if row.optional and n % 2:
        options["value_weight"] = torch.randn(4, 5, 5, dtype=dtype, requires_grad=True)
    if n % 5 == 0:
        options["scale"] = 0.3
    return tensors, options, torch.randn(*qkv[0].shape[:3], 5, dtype=dtype)


def theirs(op, tensors, options, cotangent):
    out = resolve(OPS[op], "reference")(*tensors, **options)
    leaves = [*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def ours(op, impl, tensors, options, cotangent):
    """The same in JAX; `symmetric` relations are one array twice, whose gradient is a sum."""
    learned = {n: here(x) for n, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    fixed = {n: here(x) for n, x in options.items() if n not in learned and isinstance(x, torch.Tensor)}
    static = {n: x for n, x in options.items() if n not in learned and n not in fixed}
    distinct = list({id(x): x for x in tensors}.values())
    place = [next(i for i, y in enumerate(distinct) if x is y) for x in tensors]

    def both(arrays, learned, fixed, cotangent):
        def f(arrays, learned):
            function = getattr(jaxside, op)
            return function(*(arrays[i] for i in place), **learned, **fixed, **static, impl=impl)

        out, pull = jax.vjp(f, arrays, learned)
        return out, pull(cotangent)

    out, (arrays, learned) = jax.jit(both)([here(x) for x in distinct], learned, fixed, here(cotangent))
    return [np.asarray(x) for x in (out, *(arrays[i] for i in place), *learned.values())]


def compare(came, wanted, tolerance, where):
    assert len(came) == len(wanted) > 0
    for x, y in zip(came, wanted, strict=True):
        y = y.numpy()
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        off = np.abs(x - y).max() / max(1.0, np.abs(y).max())
        assert off <= tolerance, f"{where}: {off}"


def check(op, impl, case, n, variant, dtype=torch.float64):
    tensors, options, cotangent = problem(op, case, n, dtype)
    options |= variant
    came = ours(op, impl, tensors, options, cotangent)
    compare(came, theirs(op, tensors, options, cotangent), TOLERANCE[dtype], f"{case} {variant} {n}")
    if case.mask == "rows":
        assert (came[0][0, case.size[0] // 2] == 0).all()
    if case.mask == "plane":
        assert (came[0][:, case.size[0] // 2] == 0).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("op", OPS)
def test_references_agree(op, half):
    """Half of the cases: 0, 2, 5, 7, ..., which have all biases, or the others.  Each code and relation alone is in
    test_parts.py."""
    for n, (case, variant) in some([(n, x) for n, x in enumerate(cases(op)) if (n + n // 4) % 2 == half]):
        check(op, "reference", case, n, variant)


@pytest.mark.parametrize("op", OPS)
def test_references_agree_in_float32(op):
    for n, (case, variant) in some(list(enumerate(cases(op)))[1::8]):
        check(op, "reference", case, n, variant, torch.float32)


TILES = {
    "hyla": [
        ({"normalise": "rms_heads", "act": "relu"}, ((7, 4), "offset", "rows", True, True, None, None)),
        ({"normalise": "softmax", "act": "gelu"}, ((7, 4), "per_sample", "keys", False, True, None, None)),
        ({"normalise": "identity", "act": "identity"}, ((4, 9), None, None, True, False, None, None)),
        ({"normalise": "softmax_rms_heads", "act": "silu"}, ((5, 5), "dense", "plane", True, False, 2, (0, 2, 5))),
        ({"normalise": "softmax_heads", "act": "gelu_tanh"}, ((1, 6), "offset", None, False, True, 3, None)),
    ],
    "relational_attention": [
        ({"relation_act": "softmax"}, ((7, 4), "offset", "rows", True, True, None, None)),
        ({"relation_act": "identity"}, ((5, 5), None, "keys", True, False, None, (0, 2, 2, 5))),
    ],
    "disentangled_attention": [({"relation_act": "softmax"}, ((7, 4), None, "rows", False, True, None, None))],
    "abstractor_attention": [
        ({"act": "sigmoid"}, ((7, 4), "dense", "rows", True, True, None, None)),
        ({"act": "softmax"}, ((1, 6), None, "keys", False, False, None, None)),
    ],
    "softmax_attention": [({}, ((7, 4), "offset", "rows", True, True, None, None))],
    "linear_attention": [
        ({"normalise": "identity", "act": "relu"}, ((5, 5), "dense", "plane", True, False, None, None))
    ],
    "pooled_attention": [
        ({"pool": "max", "act": "silu"}, ((7, 4), "offset", "rows", True, True, None, None)),
        ({"pool": "mean", "network": "query"}, ((4, 9), "dense", "rows", True, False, 3, None)),
    ],
}
"""Options of an op; size, bias, mask, causal, keep, window and edges of a case."""


@pytest.fixture
def _small_tiles(monkeypatch):
    """No size of the grid is a multiple of these."""
    monkeypatch.setattr(tiles, "TILE", 3)


@pytest.mark.usefixtures("_small_tiles", "x64")
@pytest.mark.parametrize(("op", "n"), [(op, n) for op in OPS for n in range(len(TILES[op]))])
def test_tiles_agree(op, n):
    variant, case = TILES[op][n]
    names = ("size", "bias", "mask", "causal", "keep", "window", "edges")
    check(op, "blocked", types.SimpleNamespace(**dict(zip(names, case, strict=True))), n, variant)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_no_tile_is_left_out_of_which_anything_is_seen(causal, window):
    """With a single limit, only tiles with a visible pair are computed."""
    for t, s, queries, keys in [(7, 7, 2, 3), (4, 9, 3, 2), (9, 4, 2, 2), (1, 6, 1, 4), (8, 8, 8, 1), (6, 6, 1, 6)]:
        options = AttentionCall(None, None, causal=causal, window=window)
        i, j = np.arange(s - t, s)[:, None], np.arange(s)
        look = ((j <= i) | (not causal)) & (np.abs(i - j) < (window or t + s))
        came = {tuple(at) for at in tiles.Grid(t, s, queries, keys, options).places()}
        grid = [(a, b) for a in range(0, t, queries) for b in range(0, s, keys)]
        wanted = {(a, b) for a, b in grid if look[a : a + queries, b : b + keys].any()}
        assert wanted <= came if causal and window else wanted == came


@pytest.mark.parametrize(("op", "n"), [("softmax_attention", n) for n in (1, 2, 3, 4)] + [("abstractor_attention", 7)])
def test_the_attention_of_jax_agrees(op, n):
    case, _ = list(cases(op))[n % 6]
    check(op, "sdpa", types.SimpleNamespace(**{**vars(case), "keep": False}), n, {}, torch.float32)
