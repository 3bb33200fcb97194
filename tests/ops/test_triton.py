"""HYLA's Triton kernels in their interpreter: output and every gradient against the reference, in float64.

Only a few cases, each ugly in several ways at once: the interpreter takes half a second for one.
"""

import pytest
import torch
from problems import make_problem
from rules import KERNELS_RUN
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.hyla import triton
from polyhead.ops.registry import OPS

pytestmark = pytest.mark.skipif(not KERNELS_RUN, reason="needs a GPU or triton's interpreter")
DEVICE = "cpu" if triton.IS_INTERPRETED else "cuda"
HALF_PRECISIONS = (torch.float16,) if triton.IS_INTERPRETED else (torch.float16, torch.bfloat16)
"""The interpreter truncates where a GPU rounds to bfloat16."""

CASES = {
    "one pair": {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1},
    "all keys of a sample hidden": {"t": 9, "s": 33, "h": 2, "g": 1, "e": 2, "hidden": True, "act": "identity"},
    "hidden samples": {"t": 3, "s": 18, "b": 5, "g": 4, "hidden": "samples"},
    "packed, rows after the last": {
        "t": 33, "edges": (0, 17, 17, 31), "g": 4, "window": 12, "normalise": "identity",
    },
    "causal window": {"t": 19, "s": 33, "h": 5, "g": 1, "window": 4, "causal": True, "bias": True, "tile": (32, 32)},
    "tiles of two sizes": {
        "t": 33, "s": 19, "h": 3, "g": 3, "tile": (16, 32), "hidden": True, "causal": True, "bias": True,
        "scale": -0.7,
    },
    "tiles of two other sizes": {"t": 19, "s": 33, "g": 4, "window": 9, "tile": (32, 16)},
    "wide values, cut": {"t": 7, "s": 17, "h": 8, "g": 2, "e": 35, "bias": True},
    "halves of wide values": {"t": 18, "s": 17, "h": 3, "g": 1, "e": 35, "causal": True, "tile": "halves"},
    "few sums of biases at once": {"t": 18, "g": 4, "causal": True, "bias": True, "constants": {"PARTIAL": 1}},
    "decoding": {"t": 3, "s": 49, "g": 4, "causal": True, "window": 40, "hidden": True, "constants": {"SPLIT": 16}},
    "a card with less memory": {"t": 5, "s": 18, "g": 4, "bias": True, "memory": 163 << 10},
    "other layouts": {"t": 17, "s": 18, "b": 3, "causal": True, "layouts": True},
    "the widest window": {"t": 3, "s": 17, "g": 4, "window": 2**31 - 1, "causal": True},
}  # fmt: skip
"""Name -> sizes and options; `tile`: queries and keys of a tile; `hidden`: keys, or whole samples, are masked."""


@pytest.fixture
def kernels():
    return pytest.importorskip("polyhead.ops.hyla.triton.kernels")


def make_call(case, dtype=torch.float64):
    """Tensors with gradients, options and a cotangent."""
    case = {"s": case["t"], **case}
    sizes = {name: case[name] for name in ("t", "s", "b", "h", "g", "d", "e", "edges") if name in case}
    qkv, options = make_problem(**sizes, bias="offset" if case.get("bias") else None, dtype=dtype)
    tensors = [x.detach().to(DEVICE) for x in qkv]
    if case.get("layouts"):  # heads outside of rows; samples innermost
        tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
        tensors[1] = tensors[1].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    tensors = [x.requires_grad_() for x in tensors]
    options |= {name: case[name] for name in ("causal", "window", "scale", "normalise", "act") if name in case}
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if case.get("hidden"):
        wider = torch.rand(len(qkv[0]), 1, 1, case["s"] + 3, device=DEVICE) > 0.4
        options["mask"] = wider[..., 1 : case["s"] + 1]
        options["mask"][0] = False
        if case["hidden"] == "samples":
            options["mask"] = options["mask"][..., :1]
    if options["bias"] is not None:
        options["bias"] = options["bias"].detach().requires_grad_()
    cotangent = torch.randn(*qkv[0].shape[:3], qkv[2].shape[3], dtype=dtype, device=DEVICE)
    return tensors, options, cotangent


def output_and_gradients(impl, tensors, options, cotangent):
    out = ops.hyla(*tensors, **options, impl=impl)
    bias = [] if options.get("bias") is None else [options["bias"]]
    return [out, *torch.autograd.grad(out, [*tensors, *bias], cotangent)]


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(monkeypatch, kernels, name):
    case = CASES[name]
    for constant, value in case.get("constants", {}).items():
        monkeypatch.setattr(kernels, constant, value)
    if "memory" in case:
        monkeypatch.setattr(triton, "shared_memory", lambda device: case["memory"])
    if case.get("tile") == "halves":
        monkeypatch.setattr(
            kernels, "tile", lambda kernel, _: kernels.TileSettings(16, 16, 8, 1, halves=kernel == "keys")
        )
    elif "tile" in case:
        monkeypatch.setattr(kernels, "tile", lambda *_: kernels.TileSettings(*case["tile"], 8, 1))
    torch.manual_seed(len(name))
    tensors, options, cotangent = make_call(case)
    if case.get("layouts"):
        cotangent = cotangent[:, :, :, :1].expand_as(cotangent)  # as the gradient of a sum is
    results = output_and_gradients("triton", tensors, options, cotangent)
    assert_close(results, output_and_gradients("reference", tensors, options, cotangent), rtol=1e-9, atol=1e-9)
    if case.get("hidden"):
        assert all((x[0] == 0).all() for x in results[:4])


@pytest.mark.parametrize("dtype", HALF_PRECISIONS, ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(dtype):
    torch.manual_seed(1)
    tensors, options, cotangent = make_call({"t": 33, "g": 4, "causal": True, "d": 8, "e": 8}, dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = output_and_gradients("reference", wide, options, cotangent.double())
    kernel, plain = (output_and_gradients(impl, tensors, options, cotangent) for impl in ("triton", "reference"))
    for x, y, z in zip(kernel, plain, exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


def test_sums_are_not_in_half_precision():
    """Of keys every sixteenth is 1, of values the first is 4096: in float16, 4096 + 1 is 4096."""
    ramp = torch.zeros(1, 80, 1, 1, dtype=torch.float16, device=DEVICE)
    ramp[:, ::16] = 1
    terms = ramp * (1 + 4095 * (ramp.cumsum(1) == 1))
    query, keys = torch.ones_like(ramp[:, :1]).requires_grad_(), torch.ones_like(ramp).requires_grad_()
    out = ops.hyla(query, keys, terms, normalise="identity", impl="triton")
    assert out.item() == 4100
    assert torch.autograd.grad(out.sum(), query)[0].item() == 2 * 4100


def test_kernels_are_never_chosen_without_a_gpu_or_where_they_are_turned_off(monkeypatch):
    q, k, v = make_problem(1, 1)[0]
    call = AttentionCall(q, k, v, masks=Masks(causal=True), normalise="identity")
    kernel = OPS["hyla"].backends["triton"]
    assert not kernel.preferred(call)
    for name, reason in (
        ("IS_INTERPRETED", "takes CUDA tensors only"),
        ("MODE", "is turned off by POLYHEAD_TRITON=0"),
        ("IS_INSTALLED", "needs triton, which is not installed"),
    ):
        monkeypatch.setattr(triton, name, "0" if name == "MODE" else False)
        assert kernel.unsupported_reason(call) == reason


@pytest.mark.compile
def test_one_graph_for_all_lengths():
    def call(impl, bias, q, *others):
        return ops.hyla(q * 1.5, *others, bias=bias, causal=True, window=7, impl=impl).sin()

    compiled = torch.compile(lambda *x: call("triton", *x), fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (5, 9):
        tensors, options, _ = make_call({"t": t, "g": 4, "bias": True})
        leaves = options["bias"], *tensors
        outs = compiled(*leaves), call("reference", *leaves)
        assert_close(*outs)
        assert_close(*(torch.autograd.grad(out.sum(), leaves) for out in outs))
