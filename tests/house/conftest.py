import importlib.util

import pytest


@pytest.fixture
def quick_jax():
    """Programs run once here: optimising them would take longer than it saves."""
    set_option = importlib.import_module("jax").config.update if importlib.util.find_spec("jax") else lambda *_: None
    set_option("jax_disable_most_optimizations", True)
    yield
    set_option("jax_disable_most_optimizations", False)
