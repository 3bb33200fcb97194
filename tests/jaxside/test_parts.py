"""Functions that are no mechanism equal PyTorch's: RoPE, codes, relations."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside, ops, spec  # noqa: E402

PLACES = np.array([[0, 1, 2, 7, 99_999], [3, 4, 5, 6, 1_000_000]])
"""Positions, some so far away that a float32 product would be off in the second digit."""

LOOK = np.random.default_rng(7).random((2, 1, 5, 5)) > 0.5
LOOK[:, :, 2] = False
PACKED = np.array([0, 2, 5], np.int32)


def code(how, n):
    """A code under one of the limits in turn."""

    def f(side, here, q, k):
        bias = here(np.random.default_rng(n).standard_normal((4, 9)).astype(str(q.dtype).removeprefix("torch.")))
        limits = ({"causal": True, "bias": bias}, {"mask": here(LOOK)}, {"window": 2, "scale": 0.4})[n % 3]
        return side.latent_code(q, k, normalise=how, **limits)

    return f, (2, 5, 4, 3), (2, 5, 2, 3)


def related(act, n):
    def f(side, here, q_rel, k_rel):
        limits = {"mask": here(LOOK[0])} if n % 2 else {"cu_seqlens": here(PACKED), "causal": True}
        return side.relations(q_rel, k_rel, relation_act=act, **limits)

    return f, (1, 5, 3, 2), (1, 5, 3, 2)


PARTS = {
    "rope": (lambda side, here, x: side.rope(x, here(PLACES[..., None])), (2, 5, 3, 8)),
    "rope, half": (lambda side, here, x: side.rope(x, here(PLACES[0]), layout="half", theta=50.0), (2, 5, 4)),
    "rope, many turns": (lambda side, here, x: side.rope(x, here(PLACES[0]), theta=1e-4), (2, 5, 8)),
    **{f"code, {how}": code(how, n) for n, how in enumerate(spec.NORMALISE)},
    **{f"relations, {act}": related(act, n) for n, act in enumerate(spec.RELATION_ACTS)},
}
"""A function of a side, its way to make an array, and arrays of these shapes."""


@jax.jit
def ours(given):
    """Results and gradients of all parts: one program."""

    def graded(f, arrays):
        out, pull = jax.vjp(lambda *a: f(jaxside, jnp.asarray, *a), *arrays)
        return [out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))]

    return {name: graded(PARTS[name][0], arrays) for name, arrays in given.items()}


def test_parts_equal_those_of_pytorch():
    dtype, tolerance = np.float64, 1e-12
    draw = np.random.default_rng(0).standard_normal
    given = {name: [draw(shape).astype(dtype) for shape in shapes] for name, (_, *shapes) in PARTS.items()}
    with jax.enable_x64(True):
        came = jax.tree.map(np.asarray, ours(given))
    for name, arrays in given.items():
        leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
        out = PARTS[name][0](ops, torch.tensor, *leaves)
        cotangent = torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)
        for x, y in zip(came[name], [out, *torch.autograd.grad(out, leaves, cotangent)], strict=True):
            y = y.detach().numpy()
            assert (x.shape, x.dtype) == (y.shape, dtype), name
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()), err_msg=name)
    assert not came["code, rms_heads"][0][:, :, 2].any()
