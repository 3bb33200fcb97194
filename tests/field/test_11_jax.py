"""Weights in bfloat16 from Haiku or Flax, whose dtype NumPy knows by another library only."""

import course_oracle
import numpy as np
import pytest
import torch

from polyhead.compat import cs336, haiku

jnp = pytest.importorskip("jax.numpy", reason="jax is not installed (extra `jax`)")


def haiku_tree(dtype):
    generator = np.random.default_rng(0)
    params = {}
    for suffix in ("", "_1", "_2", "_3"):
        weight, bias = generator.standard_normal((16, 16)) / 4, generator.standard_normal(16)
        params[f"mha/~/linear{suffix}"] = {"w": jnp.asarray(weight, dtype), "b": jnp.asarray(bias, dtype)}
    return params


def test_a_haiku_tree_in_bfloat16_becomes_a_layer_in_bfloat16():
    layer = haiku.from_haiku(haiku_tree(jnp.bfloat16), heads=4)
    exact = haiku.from_haiku(haiku_tree(jnp.float32), heads=4).state_dict()
    for name, parameter in layer.state_dict().items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, exact[name].bfloat16())
    saved = haiku.to_haiku(layer)["mha/~/linear_3"]["w"]
    assert saved.dtype == np.float32  # which NumPy has
    np.testing.assert_array_equal(saved, np.asarray(haiku_tree(jnp.bfloat16)["mha/~/linear_3"]["w"], np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_courses_weights_from_jax_load(dtype):
    state = {key: tensor.to(dtype) for key, tensor in course_oracle.state_dict(50, 1, 16, 64).items()}
    arrays = {key: jnp.asarray(tensor.float().numpy(), str(dtype)[6:]) for key, tensor in state.items()}
    loaded = cs336.save(cs336.load(arrays, heads=4, theta=1e4, context=8))
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor)
