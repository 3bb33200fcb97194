"""Every implementation of every op that runs here, called alike, in small tiles; kernels in Triton's interpreter."""

import pytest
import torch

from polyhead.ops import tiling
from polyhead.ops.hyla import triton
from polyhead.ops.linear import chunked
from polyhead.ops.registry import IMPLS, resolve
from polyhead.spec import NORMALISE

KERNELS_RUN = triton.IS_INSTALLED and (triton.IS_INTERPRETED or torch.cuda.is_available())
"""Whether Triton kernels run here."""

ALL = [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl != "triton" or KERNELS_RUN]
REQUIRED_OPTIONS = {"triton": {"causal": True}}
"""Options that an implementation requires."""


@pytest.fixture
def small_tiles(monkeypatch):
    """Two samples in a chunk, so that of three the last is alone."""
    monkeypatch.setattr(chunked, "CHUNK", 3)
    for constant, value in {"QUERIES": 3, "KEYS": 2, "NUMBERS": 100}.items():
        monkeypatch.setattr(tiling, constant, value)


def output_and_gradients(op, impl, tensors, options, cotangent, other_leaves=()):
    """The output, and the gradients of the tensors and of `other_leaves`."""
    out = resolve(op, impl)(*tensors, **options)
    return [out, *torch.autograd.grad(out, [*tensors, *other_leaves], cotangent, allow_unused=True)]


def sample_count(impl, of_triton=2, of_others=3):
    """Fewer for Triton's interpreter, which is slow."""
    return of_triton if impl == "triton" else of_others


def options_of_scores(op, impl):
    """Options by which scores are normalised or activated."""
    if impl in ("triton", "chunked"):
        return [REQUIRED_OPTIONS.get(impl, {})]
    if op in ("linear", "hyla"):
        return [{"normalise": normalise} for normalise in NORMALISE]
    if op == "abstractor":
        return [{"act": act} for act in (("softmax",) if impl == "sdpa" else ("softmax", "tanh", "silu"))]
    if op in ("relational", "disentangled"):
        acts = ("identity", "softmax") if impl in ("reference", "blocked") else ("identity",)
        return [{"relation_act": act} for act in acts]
    return [{}]
