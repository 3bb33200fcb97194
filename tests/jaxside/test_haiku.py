"""examples/haiku_attention.py equals the tutorial's module, whose arithmetic is rewritten here."""

import math
import pathlib
import runpy

import numpy as np
import pytest
from refusals import refusing

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
jnp = jax.numpy

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "haiku_attention.py"))
MultiheadAttention = EXAMPLE["MultiheadAttention"]
B, S, D, H = 2, 12, 64, 8

ours = hk.without_apply_rng(hk.transform(lambda *given: MultiheadAttention(D, H, name="mha")(*given)))


@jax.jit  # one program, where every operation would be compiled apart
def theirs(params, q, k, v, mask=None):
    """Three maps into heads, scores over the root of their width, -1e9 where the mask is 0, softmax, one map out."""
    maps = [params[f"mha/~/linear{n}"] for n in ("", "_1", "_2", "_3")]
    q, k, v = (
        (jnp.einsum("bsi,io->bso", x, m["w"]) + m["b"]).reshape(*x.shape[:2], H, D // H)
        for x, m in zip((q, k, v), maps[:3], strict=True)
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D // H)
    scores = scores if mask is None else jnp.where(mask[:, None] == 0, -1e9, scores)
    attention = jax.nn.softmax(scores, axis=-1)
    heads = jnp.einsum("bhts,bshd->bthd", attention, v)
    return jnp.einsum("bti,io->bto", heads.reshape(*heads.shape[:2], D), maps[3]["w"]) + maps[3]["b"], attention


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tree():
    """The tutorial's parameters; biases, which begin at 0, are random."""
    names = [f"mha/~/linear{n}" for n in ("", "_1", "_2", "_3")]
    return {n: {"w": drawn(D, D, seed=i) / 8, "b": drawn(D, seed=9 + i)} for i, n in enumerate(names)}


def look(*shape, kind=int):
    """A random mask in which every query sees a key."""
    mask = np.random.default_rng(3).integers(0, 2, shape)
    mask[..., 0] = 1
    return mask * 7 if kind == "sevens" else -mask if kind == "minus" else mask.astype(kind)


MASKS = {
    "keys": look(B, 1, S),
    "keys of all": look(1, 1, S, kind=bool),
    "pairs": look(B, S, S, kind="sevens"),
    "pairs of all": look(1, S, S, kind="minus"),
    "causal": np.tril(np.ones((1, S, S), bool)),
}


def close(came, wanted):
    """To 2e-6 of the largest number of each array."""
    for a, b in zip(jax.tree.leaves(came), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, float(np.abs(b).max())))


def graded(f):
    """Results and gradients of a module by its parameters, q, k and v."""
    w = drawn(B, S, D, seed=6) / 8

    def loss(params, q, k, v, mask):
        out, attention = f(params, q, k, v, mask)
        return (out * w).sum(), (out, attention)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def test_it_is_the_tutorials_module():
    mine, other, given = graded(ours.apply), graded(theirs), (tree(), *drawn(3, B, S, D, seed=5))
    for mask in (None, *MASKS.values()):
        full = None if mask is None else np.broadcast_to(mask, (B, S, S)).astype(int)  # one program for all shapes
        (_, came), gradients = mine(*given, full)
        (_, wanted), right = other(*given, full)
        assert [x.shape for x in came] == [(B, S, D), (B, H, S, S)]
        close(came, wanted)
        close(gradients, right)


def test_masks_of_all_shapes_and_kinds_mean_what_they_mean_there():
    for mask in MASKS.values():
        came = EXAMPLE["allowed"](mask, (B, S, S))
        assert (came.shape[1], came.dtype) == (1, bool)
        np.testing.assert_array_equal(np.broadcast_to(came[:, 0], (B, S, S)), np.broadcast_to(mask != 0, (B, S, S)))


def test_a_query_that_may_look_nowhere_gets_the_output_bias_alone_and_no_gradient():
    """The tutorial's module gives it the mean of all values."""
    params, (q, k, v) = tree(), drawn(3, B, S, D, seed=5)
    mask = look(B, S, S)
    mask[1, 4] = 0

    def row(v):
        out, attention = ours.apply(params, q, k, v, mask)
        return out[1, 4].sum(), (out[1, 4], attention[1, :, 4])

    slope, (out, attention) = jax.jit(jax.grad(row, has_aux=True))(v)
    np.testing.assert_array_equal(out, params["mha/~/linear_3"]["b"])
    assert not np.asarray(attention).any()
    assert not np.asarray(slope).any()


def test_dimensions_between_batch_and_sequence_are_honoured():
    """(B, ..., S, d): each is computed like a batch; keys may have another length."""
    params, q, other = tree(), drawn(B, 3, S, D, seed=5), drawn(B, 3, 7, D, seed=6)
    run = jax.jit(ours.apply)
    for mask in (look(B, 1, 7), look(1, S, 7), look(B, 3, 1, 7), look(1, 3, S, 7)):
        out, attention = run(params, q, other, other, mask)
        assert (out.shape, attention.shape) == ((B, 3, S, D), (B, 3, H, S, 7))
        for i in range(3):
            rows = mask if mask.ndim == 3 else mask[:, i]
            close([out[:, i], attention[:, i]], theirs(params, q[:, i], other[:, i], other[:, i], rows))


X = drawn(B, S, D)
WHOSE = "q, k, v must be (B, ..., S, 64) but are ("


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("mask must be (B|1, 1|S, keys) ", (X, X, X, np.ones((S, S), int))),
        ("but has shape (8, 12, 12)", (X, X, X, np.ones((H, S, S), int))),  # not one per head
        ("but has shape (8, 8)", (X[:, :H], X[:, :H], X[:, :H], np.tril(np.ones((H, H), int)))),  # nor here
        ("but has shape (2, 1, 12, 12)", (X, X, X, np.ones((B, 1, S, S), bool))),
        ("mask must name all 12 keys but has shape (2, 1, 1)", (X, X, X, np.ones((B, 1, 1), bool))),
        ("mask must be boolean or of integers but is float32", (X, X, X, np.zeros((B, 1, S), np.float32))),
        (WHOSE, (X[0], X[0], X[0])),
        (WHOSE, (X, X[:1], X[:1])),
        (WHOSE, (X, X, X[:, :3])),
    ],
)
def test_what_would_be_read_wrongly_is_an_error(said, given):
    with refusing(said):
        ours.apply(tree(), *given)


def test_heads_divide_the_width():
    with refusing("MultiheadAttention: num_heads must divide d_model 64 but is 7"):
        hk.transform(lambda x: MultiheadAttention(64, 7)(x, x, x)).init(jax.random.key(0), X)


def test_the_example_runs(capsys):
    assert EXAMPLE["main"]() == ((2, 12, 64), (2, 8, 12, 12))
    assert capsys.readouterr().out.startswith("parameters mha/~/linear mha/~/linear_1 mha/~/linear_2 mha/~/linear_3\n")
