"""For all tests: one thread, fixed seeds, empty memory that is NaN.  Warnings of ours are errors (pyproject.toml)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is imported
# XLA compiles each function for one call: its code need not be fast.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import gc
import importlib.util
import math
import pathlib
import signal
import zlib

import pytest
import submitit  # noqa: F401  (imported later, it would close handlers of absl, and these the output of pytest)
import torch
import torch.utils._device
from poison import poisoned
from thinned import spread

gc.disable()  # until all tests are collected
torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, in the processes of tests, too
torch.utils._device._device_constructors()  # torch remembers them: its own torch.empty, before it is poisoned

LONGEST = (
    *("test_docs.py", "test_devices.py", "test_engines.py", "test_trainer.py", "test_notebooks.py"),
    *("test_03_ops.py", "test_07_sweep.py", "test_08_two_processes.py", "test_analyses.py", "test_callers.py"),
)
"""Begun with, so that no worker is left with one of them when the others have finished."""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Of the cases of a test marked `thinned(n)` one in n is run: those whose names differ most."""
    items = yield
    if isinstance(items, list) and items:
        mark = items[0].get_closest_marker("thinned")
        if mark:
            count = math.ceil(len(items) / mark.args[0])
            chosen = spread([item.name for item in items], count)
            return [item for item in items if item.name in chosen]
    return items


def pytest_collection_finish():
    """Modules and tests live to the end: no collection of garbage visits them, which takes a tenth of the time.

    Compilers make millions of objects, so later garbage is collected rarely, too.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def seed_by_name(name):
    """Like torch.manual_seed, which takes a millisecond to note for each kind of device who called it."""
    torch.default_generator.manual_seed(zlib.crc32(name.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """What a fixture draws without a seed of its own is the same whatever was drawn before."""
    seed_by_name(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """The same for a test."""
    seed_by_name(item.name)


@pytest.fixture(autouse=True)
def _clean_process():
    """Empty memory is NaN while a test runs; what it sets for the whole process is put back."""
    with poisoned():
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)


@pytest.fixture
def eager():
    """`torch.compile` wraps a module, but does not compile its code."""
    with torch.compiler.set_stance("force_eager"):
        yield torch.compile


@pytest.fixture
def quick_jax():
    """Programs of JAX run once in a test: optimising them would take longer than it saves."""
    set_option = importlib.import_module("jax").config.update if importlib.util.find_spec("jax") else lambda *_: None
    set_option("jax_disable_most_optimizations", True)
    yield
    set_option("jax_disable_most_optimizations", False)


@pytest.fixture
def fixtures() -> pathlib.Path:
    return pathlib.Path(__file__).parent / "fixtures"
