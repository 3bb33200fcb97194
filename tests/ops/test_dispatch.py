"""The table of backends: names, errors, and the choice that "auto" makes."""

import pytest
import torch

from polyhead import ops
from polyhead.ops import dispatch
from polyhead.ops.code import Inputs
from polyhead.ops.dispatch import BACKENDS, PUBLIC, choose, resolve


def qkv(t=5, s=5, d=4, e=4, b=1, h=2):
    return torch.zeros(b, t, h, d), torch.zeros(b, s, h, d), torch.zeros(b, s, h, e)


def chosen(op, *, sizes=None, **options):
    """Name of the impl that auto takes."""
    run = choose(op, "auto", Inputs(*qkv(**(sizes or {})), **options))
    return next(impl for impl in BACKENDS[op] if resolve(op, impl) is run)


def test_every_op_has_a_reference_and_every_impl_can_be_called():
    for op, impls in BACKENDS.items():
        assert "reference" in impls
        for impl in ("auto", *impls):
            assert resolve(op, impl)(*qkv()).shape == (1, 5, 2, 4)
        assert resolve(op) is getattr(ops, PUBLIC[op])


def test_names_stay_functions_although_files_are_called_like_them():
    assert all(callable(getattr(ops, name)) for name in ops.__all__)


def test_unknown_names_are_one_line():
    with pytest.raises(ValueError, match=r"^hyla: unknown impl 'bloked'; did you mean 'blocked'\? \(choose from auto,"):
        resolve("hyla", "bloked")
    with pytest.raises(ValueError, match=r"^polyhead\.ops: unknown op 'hylla'; did you mean 'hyla'\?"):
        resolve("hylla")


def test_auto_takes_what_a_backend_refuses():
    keep = torch.ones(1, 1, 5, 5)
    assert chosen("softmax", keep=keep) == "reference"
    assert chosen("linear", keep=keep, normalise="identity") == "reference"
    assert chosen("linear", normalise="softmax") == "reference"


def test_auto_is_fast_on_long_sequences():
    long = {"t": 512, "s": 512}
    assert chosen("softmax", sizes=long, causal=True) == "sdpa"
    assert chosen("linear", sizes=long, causal=True, normalise="identity") == "chunked"
    assert chosen("hyla", sizes=long, causal=True, normalise="rms_heads") == "blocked"


def test_q_k_and_v_are_of_one_dtype():
    q, k, v = qkv()
    for op in BACKENDS:
        with pytest.raises(ValueError, match=f"^{PUBLIC[op]}: q, k and v must have one dtype but have torch.float64,"):
            resolve(op)(q.double(), k, v)


def test_an_impl_that_cannot_take_the_inputs_never_falls_back():
    with pytest.raises(ValueError, match="impl 'sdpa' takes no keep"):
        ops.softmax_attention(*qkv(), keep=torch.ones(1, 1, 5, 5), impl="sdpa")


def test_the_choice_imports_nothing(monkeypatch):
    def forbidden(name):
        raise AssertionError(name)

    monkeypatch.setattr(dispatch.importlib, "import_module", forbidden)
    for op in BACKENDS:
        for impl in ("auto", *BACKENDS[op]):
            getattr(ops, PUBLIC[op])(*qkv(), impl=impl)
