"""JAX on the CPU, in 64 bits if a test asks for it, with few optimisations: most of the time is compiling."""

import importlib.util
import os
from importlib import metadata

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

if importlib.util.find_spec("jax") is not None:
    if metadata.version("jax").startswith("0.10."):  # elsewhere the option may be unknown, which ends a process
        # The older code generator gives the same arithmetic in a third of the time.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

    import jax

    @pytest.fixture(autouse=True)
    def _quick_compiler(quick_jax):
        """In every test here."""

    @pytest.fixture
    def small_tiles(monkeypatch):
        """No size of a case is a multiple of these."""
        monkeypatch.setattr("polyhead.jaxside.tiles.TILE", 3)

    @pytest.fixture
    def x64():
        with jax.enable_x64(True):
            yield
