"""Functions that are no mechanism equal PyTorch's: RoPE, codes, relations."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
jnp = jax.numpy

from polyhead import jaxside, ops, spec  # noqa: E402
from polyhead.jaxside.rope import rope_angles  # noqa: E402

POSITIONS = np.array([[0, 1, 2, 7, 99_999], [3, 4, 5, 6, 1_000_000]])
"""Positions, some so far away that a float32 product would be off in the second digit."""

VISIBLE = np.random.default_rng(7).random((2, 1, 5, 5)) > 0.5
VISIBLE[:, :, 2] = False
PACKED = np.array([0, 2, 5], np.int32)


def code(normalise, n):
    """A code under one of the limits in turn."""

    def f(library, to_array, q, k):
        bias = to_array(np.random.default_rng(n).standard_normal((4, 9)).astype(str(q.dtype).removeprefix("torch.")))
        limits = ({"causal": True, "bias": bias}, {"mask": to_array(VISIBLE)}, {"window": 2, "scale": 0.4})[n % 3]
        return library.latent_code(q, k, normalise=normalise, **limits)

    return f, (2, 5, 4, 3), (2, 5, 2, 3)


def related(act, n):
    def f(library, to_array, q_rel, k_rel):
        limits = {"mask": to_array(VISIBLE[0])} if n % 2 else {"cu_seqlens": to_array(PACKED), "causal": True}
        return library.relations(q_rel, k_rel, relation_act=act, **limits)

    return f, (1, 5, 3, 2), (1, 5, 3, 2)


PARTS = {
    "rope": (lambda library, to_array, x: library.rope(x, to_array(POSITIONS[..., None])), (2, 5, 3, 8)),
    "rope, half": (
        lambda library, to_array, x: library.rope(x, to_array(POSITIONS[0]), layout="half", theta=50.0),
        (2, 5, 4),
    ),
    "rope, many turns": (lambda library, to_array, x: library.rope(x, to_array(POSITIONS[0]), theta=1e-4), (2, 5, 8)),
    **{f"code, {how}": code(how, n) for n, how in enumerate(spec.NORMALISE)},
    **{f"relations, {act}": related(act, n) for n, act in enumerate(spec.RELATION_ACTS)},
}
"""A function of a library (jaxside or ops), of what makes an array of it, and arrays of these shapes."""


@jax.jit
def results_in_jax(arrays_by_part):
    """Results and gradients of all parts: one program."""

    def graded(f, arrays):
        out, vjp = jax.vjp(lambda *a: f(jaxside, jnp.asarray, *a), *arrays)
        return [out, *vjp(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))]

    return {name: graded(PARTS[name][0], arrays) for name, arrays in arrays_by_part.items()}


def test_parts_equal_those_of_pytorch():
    dtype, tolerance = np.float64, 1e-12
    draw = np.random.default_rng(0).standard_normal
    arrays_by_part = {name: [draw(shape).astype(dtype) for shape in shapes] for name, (_, *shapes) in PARTS.items()}
    with jax.enable_x64(True):
        actual = jax.tree.map(np.asarray, results_in_jax(arrays_by_part))
    for name, arrays in arrays_by_part.items():
        leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
        out = PARTS[name][0](ops, torch.tensor, *leaves)
        cotangent = torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)
        for x, y in zip(actual[name], [out, *torch.autograd.grad(out, leaves, cotangent)], strict=True):
            y = y.detach().numpy()
            assert (x.shape, x.dtype) == (y.shape, dtype), name
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()), err_msg=name)
    assert not actual["code, rms_heads"][0][:, :, 2].any()


def test_angles_without_float64_are_exact_up_to_whole_turns():
    with jax.enable_x64(False):
        angles = rope_angles(jnp.array([0, 7, 99_999, 1_000_000, -5]), 8)
    assert angles.dtype == jnp.float32
    exact = np.array([0, 7, 99_999, 1_000_000, -5])[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(np.cos(angles), np.cos(exact), atol=2e-6)
    np.testing.assert_allclose(np.sin(angles), np.sin(exact), atol=2e-6)
