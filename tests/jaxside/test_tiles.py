"""Tiles compute what the reference computes, with its gradients in 64 bits; no size is a multiple of the tile's."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside  # noqa: E402

B, T, S, H, D, R = 2, 5, 7, 4, 3, 2
OPTIONS = {
    "softmax_attention": {},
    "linear_attention": {},
    "hyla": {"normalise": "softmax", "act": "silu"},
    "pooled_attention": {"pool": "mean"},
    "relational_attention": {"relation_act": "softmax"},
    "disentangled_attention": {"relation_act": "softmax"},
    "abstractor_attention": {"act": "softmax"},
}
LIMITS = ("bias by offset and mask", "dense bias and window", "packed and dropout")


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape))


def tensors(op, t, s, b):
    """The op's arrays: by key, or symbols by offset for the ops that read symbols."""
    q, k, v = draw(b, t, H, D), draw(b, s, H, D), draw(b, s, H, D)
    symbols = draw(t + s - 1, H, D)
    return {
        "relational_attention": (q, k, draw(b, t, R, D), draw(b, s, R, D), symbols, draw(H, D, R)),
        "disentangled_attention": (q, k, draw(b, t, H, D), draw(b, s, H, D), symbols),
        "abstractor_attention": (q, k, symbols),
    }.get(op, (q, k, v))


def limits(name, t, s):
    generator = np.random.default_rng(0)
    if name == "bias by offset and mask":
        return {"bias": draw(H, t + s - 1), "mask": generator.random((B, 1, t, s)) > 0.3, "causal": True}
    if name == "dense bias and window":
        return {"bias": draw(B, H, t, s), "window": 3}
    keep = jnp.asarray(generator.random((1, H, t, s)) > 0.3, float)
    return {"cu_seqlens": jnp.asarray([0, 2, 5], jnp.int32), "keep": keep, "causal": True}


@pytest.mark.usefixtures("small_tiles", "x64")
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("op", OPTIONS)
def test_a_call_and_its_gradients_are_those_of_the_reference(op, name):
    t, s, b = (5, 5, 1) if name == "packed and dropout" else (T, S, B)
    arrays, options = tensors(op, t, s, b), {**OPTIONS[op], **limits(name, t, s)}
    results = []
    for impl in ("blocked", "reference"):

        def loss(*arrays, impl=impl):
            return jnp.sin(getattr(jaxside, op)(*arrays, **options, impl=impl)).sum()

        results.append(jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays)))))(*arrays))
    for tiled, exact in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(tiled, exact, rtol=0, atol=1e-12)
