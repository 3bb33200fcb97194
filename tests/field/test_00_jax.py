"""Tiles on sharded rows: JAX 0.12 refused their gradients where the axes of the mesh are explicit."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")

SCRIPT = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from polyhead import jaxside
from polyhead.jaxside import tiles

assert not {"torch", "flax", "haiku"} & set(sys.modules)
tiles.TILE = 3
arrays = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5, 2, 3)), jnp.float32)

for function, options in [
    (jaxside.hyla, {"normalise": "softmax", "causal": True}),
    (jaxside.hyla, {"window": 2}),
    (jaxside.softmax_attention, {"causal": True}),
]:
    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sin(function(*qkv, impl="blocked", **options)).sum(), (0, 1, 2)))
    expected = gradients(*arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        rows = NamedSharding(jax.make_mesh((2,), ("rows",), axis_types=(kind,)), PartitionSpec("rows"))
        for array, gradient in zip(expected, gradients(*(jax.device_put(x, rows) for x in arrays)), strict=True):
            assert gradient.sharding.is_equivalent_to(rows, gradient.ndim), gradient.sharding
            np.testing.assert_allclose(array, gradient, rtol=1e-5, atol=1e-5)
print(jax.device_count())
"""


def test_gradients_on_sharded_rows_are_right_and_sharded():
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PATH": "",
    }
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["2"]
