"""The rules of tests/ops/test_rules.py in JAX: sizes of 0, biases of -inf, NaN behind a mask, forward mode."""

import numpy as np
import pytest
import torch
from problems import make_arguments, make_problem

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")

from polyhead import jaxside  # noqa: E402
from polyhead.jaxside import tiles  # noqa: E402
from polyhead.ops.dispatch import PUBLIC, TENSORS  # noqa: E402

IMPLS = [(op, impl) for op in PUBLIC for impl in ("reference", "blocked", "sdpa") if impl != "sdpa" or op == "softmax"]

SENDERS = ("k", "v", "k_rel", "symbols")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 3)


def both(op, impl, tensors, options, cotangent):
    """Output and gradients, those of a bias, too."""
    bias, rest = options["bias"], {name: x for name, x in options.items() if name != "bias"}

    def run(tensors, bias):
        return getattr(jaxside, PUBLIC[op])(*tensors, bias=bias, impl=impl, **rest)

    @jax.jit  # one program, where every operation would be compiled apart
    def graded(tensors, bias):
        out, pull = jax.vjp(run, tensors, bias)
        return out, *jax.tree.leaves(pull(cotangent))

    return graded(tensors, bias)


@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_what_is_hidden_counts_for_nothing(op, impl):
    """Two keys of sample 0 are NaN behind a mask; of a bias by offset some are -inf, for query 0 of sample 0 all."""
    torch.manual_seed(0)
    qkv, options = make_problem(4, 5, mask="keys", bias="offset", dtype=torch.float32)
    tensors = [x.detach().numpy() for x in make_arguments(op, qkv)]
    mask, bias = options["mask"].numpy(), options["bias"].detach().numpy()
    mask[0, ..., [1, 3]] = False
    given = list(zip(TENSORS[op], tensors, strict=True))
    bias[:, 3:] = -np.inf
    bias[0, 1] = -np.inf
    shown = np.stack([bias[:, 3 - i : 8 - i] for i in range(4)], 1) > -np.inf
    hidden = ~mask[:, 0, 0, :, None, None]
    spoilt, zeros = (
        [np.where(hidden, np.float32(fill), x) if name in SENDERS else x for name, x in given] for fill in ("nan", 0)
    )
    cotangent = np.random.default_rng(0).standard_normal((2, 4, 4, 5)).astype(np.float32)
    came = both(op, impl, spoilt, {"bias": bias, "mask": mask}, cotangent)
    finite = np.where(bias > -np.inf, bias, 0).astype(np.float32)
    wanted = both(op, "reference", zeros, {"bias": finite, "mask": mask & shown}, cotangent)
    for x, y in zip(came, wanted, strict=True):
        assert np.abs(x - y).max() <= 1e-5
    assert (came[0][:, 0] == 0).all()


@pytest.mark.parametrize("op", PUBLIC)
@pytest.mark.parametrize("fill", ["nan", "inf"])
def test_what_every_query_sees_is_never_lost(op, fill):
    """tests/ops/test_not_finite.py: tiles are NaN wherever the reference is, as every query sees every key."""
    torch.manual_seed(0)
    for name in TENSORS[op]:
        tensors = [x.detach().numpy().copy() for x in make_arguments(op, make_problem(4, 5, dtype=torch.float32)[0])]
        tensors[TENSORS[op].index(name)].reshape(-1)[7] = float(fill)
        cotangent = np.ones((2, 4, 4, 5), np.float32)
        came, wanted = (both(op, impl, tensors, {"bias": None}, cotangent) for impl in ("blocked", "reference"))
        found = [np.isnan(y) for y in wanted]
        assert any(y.any() for y in found) or fill == "inf"
        for x, y in zip(came, found, strict=True):
            assert not np.isfinite(np.asarray(x)[y]).any(), name


@pytest.mark.parametrize(("op", "impl"), [("hyla", "blocked"), ("softmax", "blocked"), ("softmax", "sdpa")])
def test_nothing_comes_of_nothing(op, impl):
    for b, t, s in (0, 3, 4), (2, 0, 3), (2, 3, 0):
        tensors = [x.detach().numpy() for x in make_problem(t, s, b=b, dtype=torch.float32)[0]]
        for bias in (None, np.ones((4, t + s - 1), np.float32)):
            out, *grads = both(op, impl, tensors, {"bias": bias}, np.ones((b, t, 4, 5), np.float32))
            assert out.shape == (b, t, 4, 5)
            assert (out == 0).all()
            assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads, tensors, strict=False))


def test_tiles_refuse_forward_mode_and_references_know_it():
    q, k, v = (x.detach().numpy() for x in make_problem(4, 4, dtype=torch.float32)[0])
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(lambda q: jaxside.hyla(q, k, v, impl="blocked"), (q,), (q,))
    jax.jvp(lambda q: jaxside.hyla(q, k, v, impl="reference"), (q,), (q,))


@pytest.mark.parametrize("what", ["code", "relations", "textbook"])
def test_codes_and_the_textbook_know_nothing_of_hidden_keys(what):
    mask = np.array([True, True, False, True])
    q, k = np.random.default_rng(0).standard_normal((2, 1, 4, 2, 3)).astype(np.float32)

    def run(q, k):
        if what == "code":
            return jaxside.latent_code(q, k, normalise="rms_heads", mask=mask)
        if what == "relations":
            return jaxside.relations(q, k, relation_act="softmax", mask=mask)
        return jaxside.scaled_dot_product_attention(q[:, :, 0], k[:, :, 0], k[:, :, 0], mask[None])

    found = []
    for fill in (np.nan, 0):
        spoilt = np.where(mask[:, None, None], k, np.float32(fill))
        out, pull = jax.vjp(run, q, spoilt)
        found.append([out, *pull(np.ones_like(out))])
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_scale_is_one_number_for_all_impls():
    q = np.ones((1, 3, 2, 4), np.float32)
    for impl in ("auto", "reference", "blocked"):
        with pytest.raises(
            ValueError, match=r"^hyla: scale must be a number but has shape \(2, 1\); multiply q by it$"
        ):
            jaxside.hyla(q, q, q, scale=np.ones((2, 1), np.float32), impl=impl)
