import importlib.util

import pytest


@pytest.fixture
def quick_jax():
    """Programs run once here: optimising them would take longer than it saves."""
    if importlib.util.find_spec("jax") is None:
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
