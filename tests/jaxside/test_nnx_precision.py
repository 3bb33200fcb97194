"""Half precision of NNX models, whose parameters in float32 are cast by a loss.

The measure is that of tests/test_precision.py: the same model of PyTorch, every operation of which is rounded.
"""

import copy
import dataclasses
import functools

import doors
import numpy as np
import pytest
import torch

import polyhead as ph

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
flax = pytest.importorskip("flax", reason="flax is not installed (extra `flax`)")
jnp = jax.numpy

from polyhead.jaxside import convert, nnx  # noqa: E402
from polyhead.jaxside.nnx import components  # noqa: E402

HEADS = (ph.Softmax(4), ph.Hyla(4))
SETTINGS = dataclasses.replace(doors.settings("Softmax"), heads=HEADS, layers=1)


def in_precision(x, dtype):
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.jit, static_argnums=(0, 1))
def graded(graph, dtype, state, weights):
    """Logits, and gradients of a sum of them in the dtype of the parameters, which are cast for the call."""

    def loss(params):
        cast = jax.tree.map(lambda x: in_precision(x, dtype), (params, state[1]))
        logits = flax.nnx.merge(graph, *cast)(doors.tokens_of().numpy())
        return (logits.astype(jnp.float32) * weights).sum(), logits

    return jax.grad(loss, has_aux=True)(state[0])


@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_in_half_precision(dtype):
    found, ours = [], nnx.Transformer(SETTINGS)
    for draw in range(doors.DRAWS):
        torch.manual_seed(draw)
        theirs = ph.Transformer(SETTINGS)
        wanted = doors.measured(theirs, lambda module: module(doors.tokens_of()))
        with doors.Rounding(getattr(torch, dtype)):
            module = copy.deepcopy(theirs).to(getattr(torch, dtype)).float()
            rounded = doors.measured(module, lambda module: module(doors.tokens_of()))
        state = {name: x.numpy() for name, x in theirs.state_dict().items()}
        graph, *state = flax.nnx.split(convert.to_flax(state, ours), flax.nnx.Param, ...)
        slopes, logits = graded(graph, dtype, state, doors.weights_of(wanted[0]).numpy())
        assert logits.dtype == dtype
        assert all(slope.dtype == jnp.float32 for slope in jax.tree.leaves(slopes))
        named = {name: np.asarray(x[...]) for name, x in convert.named(flax.nnx.merge(graph, slopes, state[1]))}
        vector = np.concatenate([named[name].ravel() for name, _ in theirs.named_parameters()])
        came = torch.tensor(np.asarray(logits.astype(jnp.float32))), torch.tensor(vector)
        found.append([doors.off(x, z) / doors.off(y, z) for x, y, z in zip(came, rounded, wanted, strict=True)])
    assert (torch.tensor(found).log().mean(0).exp() <= doors.TIMES).all(), found


def test_alibi_is_exact_in_bfloat16():
    """At the distances 300 to 400 its biases, rounded to bfloat16, would be off by up to a quarter."""
    x, far = jax.random.normal(jax.random.key(0), (1, 400, 24), "bfloat16"), np.arange(400) - np.arange(400)[:, None]
    graph, state = flax.nnx.split(nnx.MultiHeadAttention(24, ph.Softmax(8), positions=ph.Alibi()))
    state = jax.tree.map(lambda p: in_precision(p, "bfloat16"), state)
    came, exact = (
        flax.nnx.merge(graph, jax.tree.map(lambda p, to=dtype: in_precision(p, to), state))(
            x.astype(dtype), mask=(far >= 300)[None, None]
        ).astype("float32")
        for dtype in ("bfloat16", "float32")
    )
    assert jnp.linalg.norm(came - exact) < 0.01 * jnp.linalg.norm(exact)


def test_dropout_keeps_the_mean_in_bfloat16(monkeypatch):
    """A number 0.9 would be rounded to bfloat16 first, and all outputs would be larger by 0.17 %."""
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p, shape: jnp.ones(shape, bool))
    x = jnp.linspace(1, 2, 129).astype(jnp.bfloat16)
    kept = components.dropped(x, 0.1, flax.nnx.Rngs(0)).astype(jnp.float32)
    assert abs(float((kept * 0.9 / x.astype(jnp.float32)).mean()) - 1) < 5e-4
    graph, state = flax.nnx.split(nnx.MultiHeadAttention(32, ph.Softmax(2), dropout=0.1))
    layer = flax.nnx.merge(graph, jax.tree.map(lambda p: in_precision(p, "bfloat16"), state))
    x = jax.random.normal(jax.random.key(0), (4, 64, 32), "bfloat16")
    kept, plain = (layer(x, rngs=rngs).astype(jnp.float32) for rngs in (flax.nnx.Rngs(0), None))
    assert abs(float((kept * plain).sum() / jnp.square(plain).sum()) * 0.9 - 1) < 5e-4
