"""Every impl of every op that runs here, called alike, in tiles so small that a few rows fill several.

Kernels run in Triton's interpreter.
"""

import importlib

import pytest
import torch

from polyhead.ops import tiling
from polyhead.ops.cards import INTERPRETED, TRITON
from polyhead.ops.dispatch import BACKENDS, resolve
from polyhead.ops.hyla import blocked as hyla_blocked
from polyhead.ops.relational import blocked as relational_blocked
from polyhead.spec import NORMALISE

ALL = [
    (op, impl)
    for op, impls in BACKENDS.items()
    for impl in impls
    if impl != "triton" or (TRITON and (INTERPRETED or torch.cuda.is_available()))
]
NEEDED = {"state": {"normalise": "identity", "act": "identity"}, "triton": {"causal": True}}
"""Options that an impl requires."""


@pytest.fixture
def small_tiles(monkeypatch):
    """Two samples in a chunk, so that of three the last is alone."""
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.chunked"), "CHUNK", 3)
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.triton"), "CHUNK", 16)
    for constant, value in {"QUERIES": 3, "KEYS": 2, "PAIRS": 60, "ROWS": 50}.items():
        monkeypatch.setattr(hyla_blocked, constant, value)
    for constant, value in {"QUERIES": 3, "PAIRS": 120, "ROWS": 50}.items():
        monkeypatch.setattr(relational_blocked, constant, value)
    for constant, value in {"QUERIES": 3, "KEYS": 2, "NUMBERS": 100}.items():
        monkeypatch.setattr(tiling, constant, value)


def grads(op, impl, tensors, options, cotangent, more=()):
    out = resolve(op, impl)(*tensors, **options)
    return [out, *torch.autograd.grad(out, [*tensors, *more], cotangent, allow_unused=True)]


def samples(impl, few=2, many=3):
    """Fewer for Triton's interpreter, which is slow."""
    return few if impl == "triton" else many


def choices(op, impl):
    """Options by which scores are normalised or activated."""
    if impl in ("triton", "state", "chunked", "recurrent") or (op, impl) == ("linear", "native"):
        return [NEEDED.get(impl, {})]
    if op in ("linear", "hyla"):
        return [{"normalise": n} for n in NORMALISE]
    if op == "abstractor":
        return [{"act": "softmax"}, *([] if impl == "sdpa" else [{"act": "tanh"}, {"act": "silu"}])]
    return [{}]
