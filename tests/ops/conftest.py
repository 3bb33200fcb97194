"""Random arguments (support/problems.py), native code in float64, and no native code without a compiler."""

import pytest
import torch
from compilers import READY
from problems import make_arguments, make_problem
from rules import small_tiles

from polyhead.ops.native import library

__all__ = ["small_tiles"]


def pytest_runtest_setup(item):
    if not READY and "native" in getattr(item, "callspec", item).__dict__.get("params", {}).values():
        pytest.skip("no compiler")


@pytest.fixture(autouse=True)
def _native_code_takes_float64(monkeypatch):
    """Of the same sources, compiled once more, so that it is held to what all other impls are held to."""
    monkeypatch.setitem(library.COMPUTE_DTYPES, torch.float64, torch.float64)


@pytest.fixture
def problem():
    return make_problem


@pytest.fixture
def arguments():
    return make_arguments
