"""JAX on the CPU, in 64 bits where a test asks for it, hardly optimised: compiling is what these tests cost."""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

if importlib.util.find_spec("jax") is not None:
    import jax

    @pytest.fixture(autouse=True)
    def _quick_compiler():
        """Programs run once here: optimising them would take longer than it saves."""
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)

    @pytest.fixture
    def x64():
        with jax.enable_x64(True):
            yield
