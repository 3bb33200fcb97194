"""For all tests: uninitialised memory is NaN, warnings are errors (pyproject.toml), one thread per worker."""

import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import random
import typing
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib

import jaxtyping
import jaxtyping._import_hook as hook
import pytest
import torch
import torch.utils._device
from poison import poisoned
from thinned import spread

gc.disable()  # until all is imported: the collector would walk over it again and again
torch.set_num_threads(1)
if not torch.cuda.is_available():  # for every kind of device that is absent it writes down the whole stack: 1 ms
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
torch.utils._device._device_constructors()  # torch remembers them: its own torch.empty, before it is poisoned
os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is imported


def _patched_once(plain):
    """Triton's interpreter replaces functions of its language while a kernel runs; again at each call of a function in
    it, a third of the time.  Once for each module whose functions are called is enough."""
    done = set()

    def patch(fn):
        where = id(fn.__globals__)
        if where in done:
            return None  # nobody asks for it: the first one, which is asked, restores everything
        kernel, scope = not done, plain(fn)
        if kernel and hasattr(scope, "restore"):
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        if done or hasattr(scope, "restore"):
            done.add(where)
        return scope

    return patch


def _by_name(plain):
    """Triton's interpreter makes its table of dtypes anew at each call."""
    known = {}

    def found(kind):
        name = getattr(kind, "scalar", kind).name
        if name not in known:
            known[name] = plain(kind)
        return known[name]

    return found


if importlib.util.find_spec("triton") is not None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    # It computes whether integers overflow, a quarter of the time, and then says nothing of it.
    options, builder = interpreter.InterpreterOptions, interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = options(sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)

# tyro forgets with every command line what it read of the sources of the settings: a quarter of the time.
sources = importlib.import_module("tyro._docstrings")._ClassTokenization
sources.make = staticmethod(functools.cache(inspect.unwrap(sources.make)))


def _of_shapes(annotation):
    """Whether an annotation speaks of the shape of an array, or may, as a string does."""
    if isinstance(annotation, (str, typing.ForwardRef, typing.TypeVar)):
        return True
    if isinstance(annotation, (list, tuple)):  # the arguments of a Callable
        return any(map(_of_shapes, annotation))
    shapes = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return shapes or any(map(_of_shapes, typing.get_args(annotation)))


CHECKED = set()
"""Calls that were checked in this test: the function, and of its arguments what a check looks at."""


def _looked_at(x):
    """Of an array its shape and dtype, of what may name a size its value, of anything else what it is."""
    if isinstance(x, torch.Tensor) or (hasattr(x, "shape") and hasattr(x, "dtype")):
        return type(x), tuple(x.shape), x.dtype
    if isinstance(x, (list, tuple)):
        return type(x), tuple(map(_looked_at, x))
    if isinstance(x, dict):
        return tuple((key, _looked_at(value)) for key, value in x.items())
    return type(x), x if isinstance(x, (int, float, str)) else None


def _once(f, check):
    """A call that asks what was asked before in the same test goes to the function itself, at a tenth of the time."""
    check = functools.cache(check)

    @functools.wraps(f)
    def run(*args, **kwargs):
        call = f, _looked_at(args), _looked_at(kwargs)
        if call in CHECKED:
            return f(*args, **kwargs)
        out = check(f)(*args, **kwargs)
        CHECKED.add(call)  # where it was refused, it is refused again
        return out

    return run


def _jaxtyped(*, typechecker, plain=jaxtyping.jaxtyped):
    """What --jaxtyping-packages puts around every function; here around those whose annotations speak of shapes.
    mypy checks the others, without running them; they would take a twelfth of the time."""

    def decorate(f):
        g = (dataclasses.is_dataclass(f) and vars(f).get("__init__")) or f
        if inspect.isfunction(g) and not any(map(_of_shapes, g.__annotations__.values())):
            return f
        check = plain(typechecker=typechecker)
        return _once(f, check) if inspect.isfunction(f) else check(f)

    return decorate


jaxtyping.jaxtyped = _jaxtyped


PACKAGE = os.path.dirname(importlib.util.find_spec("polyhead").origin)


def _only_ours(typechecker_hash, path, debug_override=None, plain=hook._optimized_cache_from_source):
    """What a module of the package imports from elsewhere has its ordinary compiled file, not one more."""
    if os.fspath(path).startswith(PACKAGE):
        return plain(typechecker_hash, path, debug_override)
    return importlib.util.cache_from_source(path, debug_override)


hook._optimized_cache_from_source = _only_ours


def pytest_addoption(parser):
    parser.addoption("--order", default="", help="reverse or random:SEED: files, and the tests in each, in that order")


LONGEST = (
    "test_door.py", "test_docs.py", "test_devices.py", "test_site.py", "test_jobs.py", "test_bad_input.py",
    "test_trainer.py", "test_faults.py", "test_saving.py", "test_tracking.py", "test_checkpoint.py",
)  # fmt: skip
"""Begun with, so that no worker is left with one of them when the others have finished."""

SLOW = ("test_campaign.py", "test_triton.py")
"""Among the folders of `make check`, what it leaves to `make test`."""


def has_tests_of(marker, path):
    text = path.read_text(encoding="utf-8")
    return f"mark.{marker}" in text or (marker == "campaign" and "mark.thinned" in text)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Of the cases of a test marked `thinned(n)`, one in n is in `make test`, the others in the campaign alone."""
    items = yield
    if isinstance(items, list) and items and (mark := items[0].get_closest_marker("thinned")):
        chosen = spread([item.name for item in items], -(-len(items) // mark.args[0]))
        for item in items:
            if item.name not in chosen:
                item.add_marker("campaign")
    return items


def pytest_itemcollected(item):
    if item.path.name in SLOW:
        item.add_marker("slow")
    for marker in ("compile", "campaign"):
        if item.get_closest_marker(marker) and not has_tests_of(marker, item.path):
            raise pytest.UsageError(f"{item.nodeid} would not be found: its file does not say mark.{marker}")


def pytest_ignore_collect(collection_path, config):
    """With `-m "compile and ..."` or `-m "campaign and ..."` files without such tests are not even imported."""
    marker = config.option.markexpr.partition(" ")[0]
    if marker in ("compile", "campaign") and collection_path.name.startswith("test_"):
        return None if has_tests_of(marker, collection_path) else True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Another order, the same in every worker; a file's tests stay together, for its fixtures are made once."""
    order, _, seed = config.getoption("--order").partition(":")
    if not order:
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    elif order == "reverse":
        items.reverse()
    elif order == "random" and seed.isdecimal():
        draw = random.Random(int(seed))
        files = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (files[item.path], draw.random()))
    elif order:
        raise pytest.UsageError(f"--order: expected reverse or random:SEED, found {config.getoption('--order')!r}")


def pytest_collection_finish(session):
    """What is imported stays: the collector need not walk over it again, nor copied processes touch its pages."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """What a test or a fixture draws without a seed of its own is the same whatever was drawn before."""
    torch.manual_seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    CHECKED.clear()
    torch.manual_seed(zlib.crc32(item.name.encode()))


@pytest.fixture(autouse=True)
def _as_it_was():
    """Empty memory is poisoned; what a test sets for the whole process is put back."""
    with poisoned():
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)


@pytest.fixture
def eager():
    """torch.compile wraps a module, but does not compile its code."""
    with torch.compiler.set_stance("force_eager"):
        yield torch.compile


@pytest.fixture
def fixtures() -> pathlib.Path:
    return pathlib.Path(__file__).parent / "fixtures"
