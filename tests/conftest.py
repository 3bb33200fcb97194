"""For all tests: memory nobody wrote is NaN, warnings are errors (pyproject.toml), one thread per worker."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib

import pytest
import torch
import torch.utils._device

torch.set_num_threads(1)
torch.utils._device._device_constructors()  # torch remembers them: its own torch.empty, before it is poisoned
if not torch.cuda.is_available():  # before a kernel is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _poison_empty_memory(monkeypatch):
    """A tail that a kernel forgets to write becomes NaN instead of whatever lay there."""
    plain = {"empty": torch.empty, "empty_like": torch.empty_like}

    def poisoned(make):
        def fill(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if torch.compiler.is_compiling() or tensor.is_meta or not tensor.is_floating_point():
                return tensor
            return tensor.fill_(float("nan"))

        return fill

    if not torch.compiler.is_compiling():
        for name, make in plain.items():
            monkeypatch.setattr(torch, name, poisoned(make))


@pytest.fixture
def fixtures() -> pathlib.Path:
    return FIXTURES
