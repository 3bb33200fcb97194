"""`compat.haiku.MultiheadAttention` is the tutorial's module, whose arithmetic is written again here."""

import itertools
import math

import numpy as np
import pytest
from refusals import refusing

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
jnp = jax.numpy

from polyhead.compat.haiku import MultiHeadAttention, MultiheadAttention  # noqa: E402

BATCH, LENGTH, WIDTH, HEADS = 2, 12, 64, 8

module = hk.without_apply_rng(hk.transform(lambda *inputs: MultiheadAttention(WIDTH, HEADS, name="mha")(*inputs)))


def test_the_cell_of_the_tutorial_runs():
    """The cell "Test MultiheadAttention implementation"."""
    rng = jax.random.key(0)
    rng_iter = iter(hk.PRNGSequence(1))

    bs = 2
    seq_len = 12
    d_model = 64
    num_heads = 8

    def test_mha(q, k, v, mask=None):
        mha = MultiheadAttention(d_model, num_heads, name="mha")
        return mha(q, k, v, mask)

    mha = hk.without_apply_rng(hk.transform(test_mha))

    # Example features as input
    q, k, v = jax.random.normal(next(rng_iter), (3, bs, seq_len, d_model))
    mask = jax.random.randint(rng, (bs, 1, seq_len), minval=0, maxval=2)

    # Initialize parameters of attention with random key and inputs
    params = mha.init(next(rng_iter), q, k, v, mask)

    # Apply attention with parameters on the inputs
    out, attn = mha.apply(params=params, q=q, k=k, v=v, mask=mask)
    assert (out.shape, attn.shape) == ((2, 12, 64), (2, 8, 12, 12))
    assert sorted(params) == ["mha/~/linear", "mha/~/linear_1", "mha/~/linear_2", "mha/~/linear_3"]


def test_a_module_without_a_name_has_the_tutorials():
    def two_modules(x):
        return MultiheadAttention(WIDTH, HEADS)(x, x, x)[0] + MultiHeadAttention(WIDTH, HEADS)(x, x, x)[0]

    params = hk.transform(two_modules).init(jax.random.key(0), X)
    assert {name.split("/")[0] for name in params} == {"multihead_attention", "multihead_attention_1"}


@jax.jit
def tutorial(params, q, k, v, mask=None):
    """Three maps into heads, scores over the root of their width, -1e9 where the mask is 0, softmax, one map out."""
    maps = [params[f"mha/~/linear{suffix}"] for suffix in ("", "_1", "_2", "_3")]
    heads = []
    for x, linear in zip((q, k, v), maps[:3], strict=True):
        heads.append((x @ linear["w"] + linear["b"]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS))
    q, k, v = heads
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(WIDTH // HEADS)
    if mask is not None:
        scores = jnp.where(mask[:, None] == 0, -1e9, scores)
    attention = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", attention, v)
    return out.reshape(*out.shape[:2], WIDTH) @ maps[3]["w"] + maps[3]["b"], attention


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tutorial_parameters():
    """The tutorial's parameters; biases, which begin at 0, are random."""
    params = {}
    for i, suffix in enumerate(("", "_1", "_2", "_3")):
        weight = normal(WIDTH, WIDTH, seed=i) / 8
        params[f"mha/~/linear{suffix}"] = {"w": weight, "b": normal(WIDTH, seed=9 + i)}
    return params


def random_mask(*shape):
    """A mask in which every query sees the first key."""
    mask = np.random.default_rng(3).integers(0, 2, shape)
    mask[..., 0] = 1
    return mask


MASKS = {
    "keys": random_mask(BATCH, 1, LENGTH),
    "keys of all": random_mask(1, 1, LENGTH).astype(bool),
    "pairs": random_mask(BATCH, LENGTH, LENGTH) * 7,
    "pairs of all": -random_mask(1, LENGTH, LENGTH),
    "causal": np.tril(np.ones((1, LENGTH, LENGTH), np.float32)),
}


def results_and_gradients(apply):
    """A function with the results of a module, and its gradients by its parameters, q, k and v."""
    weight = normal(BATCH, LENGTH, WIDTH, seed=6) / 8

    def loss(params, q, k, v, mask):
        out, attention = apply(params, q, k, v, mask)
        return (out * weight).sum(), (out, attention)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def test_results_and_gradients_are_those_of_the_tutorial():
    inputs = (tutorial_parameters(), *normal(3, BATCH, LENGTH, WIDTH, seed=5))
    for mask in MASKS.values():
        full_mask = np.broadcast_to(mask != 0, (BATCH, LENGTH, LENGTH)).astype(int)
        results = jax.tree.leaves(results_and_gradients(module.apply)(*inputs, mask))
        expected = jax.tree.leaves(results_and_gradients(tutorial)(*inputs, full_mask))
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, float(np.abs(b).max())))


def test_a_query_without_visible_keys_gets_the_output_bias_and_no_gradient():
    params = tutorial_parameters()
    q, k, v = normal(3, BATCH, LENGTH, WIDTH, seed=5)
    mask = random_mask(BATCH, LENGTH, LENGTH)
    mask[1, 4] = 0

    def row(v):
        out, attention = module.apply(params, q, k, v, mask)
        return out[1, 4].sum(), (out[1, 4], attention[1, :, 4])

    slope, (out, attention) = jax.jit(jax.grad(row, has_aux=True))(v)
    np.testing.assert_array_equal(out, params["mha/~/linear_3"]["b"])
    assert not np.asarray(attention).any()
    assert not np.asarray(slope).any()


def test_dimensions_between_batch_and_sequence_are_batch_dimensions():
    params, q = tutorial_parameters(), normal(BATCH, 3, LENGTH, WIDTH, seed=5)
    other = normal(BATCH, 3, 7, WIDTH, seed=6)
    run = jax.jit(module.apply)
    for mask, i in itertools.product((random_mask(BATCH, 1, 7), random_mask(BATCH, 3, 1, 7)), range(3)):
        out, attention = run(params, q, other, other, mask)
        assert (out.shape, attention.shape) == ((BATCH, 3, LENGTH, WIDTH), (BATCH, 3, HEADS, LENGTH, 7))
        rows = mask if mask.ndim == 3 else mask[:, i]
        expected_out, expected_attention = tutorial(params, q[:, i], other[:, i], other[:, i], rows)
        np.testing.assert_allclose(out[:, i], expected_out, rtol=0, atol=1e-5)
        np.testing.assert_allclose(attention[:, i], expected_attention, rtol=0, atol=1e-5)


X = normal(BATCH, LENGTH, WIDTH)


@pytest.mark.parametrize(
    ("error", "inputs"),
    [
        ("mask must be (B|1, 1|S, keys) ", (X, X, X, np.ones((LENGTH, LENGTH), int))),
        ("got (8, 12, 12)", (X, X, X, np.ones((HEADS, LENGTH, LENGTH), int))),
        ("q, k, v must be (B, ..., S, 64), got (12, 64)", (X[0], X[0], X[0])),
    ],
)
def test_an_input_that_the_tutorial_reads_wrongly_is_an_error(error, inputs):
    with refusing(error):
        module.apply(tutorial_parameters(), *inputs)


def test_the_number_of_heads_must_divide_the_width():
    with refusing("MultiheadAttention: num_heads must divide d_model 64, got 7"):
        hk.transform(lambda x: MultiheadAttention(64, 7)(x, x, x)).init(jax.random.key(0), X)
