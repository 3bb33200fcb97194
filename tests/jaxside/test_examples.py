"""The examples of HYLA in Haiku and in Flax NNX compute what our PyTorch layer computes, and train."""

import runpy

import numpy as np
import pytest
import torch
from scripts import ROOT

import polyhead as ph
from polyhead.compat.haiku import to_state_dict

jax = pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")


def test_hyla_in_haiku_equals_our_layer_and_trains():
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
    example = runpy.run_path(str(ROOT / "examples" / "haiku_hyla.py"))
    attention = hk.without_apply_rng(hk.transform(lambda *inputs: example["HylaAttention"](16, 4, name="a")(*inputs)))
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    mask = np.array([[[1, 1, 0, 1, 1]], [[1, 0, 1, 1, 0]]])
    params = attention.init(jax.random.key(0), x, x, x, mask)
    layer = ph.MultiHeadAttention(16, ph.Hyla(4), bias=True)
    layer.load_state_dict(to_state_dict(params))
    expected = layer(torch.from_numpy(x), mask=torch.from_numpy(mask != 0)[:, None]).detach()
    np.testing.assert_allclose(attention.apply(params, x, x, x, mask), expected, rtol=0, atol=1e-5)
    assert example["main"]() > 0.01


def test_hyla_in_flax_equals_our_layer_and_trains():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    example = runpy.run_path(str(ROOT / "examples" / "nnx_hyla.py"))
    layer = ph.MultiHeadAttention(16, ph.Hyla(4), causal=True)
    model = example["HylaAttention"](16, 4, rngs=nnx.Rngs(0))
    model.load({name: tensor.numpy() for name, tensor in layer.state_dict().items()})
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    np.testing.assert_allclose(model(x), layer(torch.from_numpy(x)).detach(), rtol=0, atol=1e-5)
    assert example["main"]() > 0.01
