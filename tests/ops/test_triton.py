"""Triton's kernels in its interpreter: output and every gradient against the reference, in float64.

Only a few cases, each ugly in several ways at once: the interpreter takes half a second for one.
"""

import importlib

import pytest
import torch
from problems import make_arguments, make_problem
from torch.testing import assert_close

from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import INTERPRETED, TRITON
from polyhead.ops.custom_op_rules import packed
from polyhead.ops.dispatch import implementation, resolve
from polyhead.spec import RELATION_ACTS

pytestmark = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or triton's interpreter"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = ("hyla", "linear", "relational")

SOFTMAX = {"normalise": "softmax"}
ONE_PAIR = {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1}
LESS_MEMORY = {"shared_memory": lambda device: 163 << 10}
HYLA = {
    "one pair": ONE_PAIR,
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
    "softmax": {"t": 17, "s": 19, "causal": True, "window": 9, "bias": True, "hidden": True} | SOFTMAX,
    "softmax, packed": {"t": 19, "edges": (0, 0, 1, 12, 19), "h": 3, "g": 1, "bias": True, "tile": (16, 16)} | SOFTMAX,
    "softmax, decoding": {"t": 1, "s": 49, "h": 8, "g": 8, "constants": {"SPLIT": 16}} | SOFTMAX,
    "a card with less memory": {"t": 5, "s": 18, "g": 4, "bias": True, "constants": LESS_MEMORY},
    "other layouts": {"t": 17, "s": 18, "b": 3, "causal": True, "layouts": True},
    "the widest window": {"t": 3, "s": 17, "g": 4, "window": 2**31 - 1, "causal": True},
}  # fmt: skip
LINEAR = {
    "one pair": ONE_PAIR,
    "three chunks and a bit, groups": {"t": 35, "act": "relu"},
    "more keys than queries, scale": {"t": 7, "s": 38, "h": 3, "g": 1, "scale": -0.7},
    "more queries than keys, hidden keys": {"t": 21, "s": 7, "h": 2, "hidden": True},
    "wide values, narrow queries": {"t": 18, "s": 20, "b": 1, "h": 2, "d": 17, "e": 19},
    "packed": {"t": 38, "edges": (0, 0, 1, 18, 32, 32, 38)},
    "packed, rows after, other layouts": {"t": 36, "edges": (0, 16, 17, 33), "h": 2, "layouts": True},
}
RELATIONAL = {
    "one pair": {**ONE_PAIR, "r": 1, "p": 1, "act": "sigmoid"},
    "odd sizes": {
        "t": 7, "s": 19, "h": 3, "g": 1, "d": 17, "r": 5, "p": 3, "act": "relu", "bias": True, "scale": -0.7,
    },
    "more queries than keys": {"t": 19, "s": 7, "h": 5, "g": 5, "r": 9, "causal": True, "act": "tanh", "bias": True},
    "hidden keys": {"t": 19, "s": 33, "r": 2, "act": "gelu", "hidden": True, "causal": True},
    "hidden samples": {"t": 3, "s": 18, "b": 5, "act": "relu", "hidden": "samples"},
    "packed, rows after the last": {
        "t": 33, "edges": (0, 20, 20, 31), "window": 6, "act": "gelu_tanh", "bias": True,
    },
    "offsets, causal window": {"t": 19, "s": 33, "g": 1, "offset": True, "causal": True, "window": 4, "act": "relu"},
    "offsets, packed": {"t": 33, "edges": (0, 5, 5, 21, 33), "offset": True, "act": "identity"},
    "parts of offsets": {"t": 5, "s": 3, "h": 12, "g": 3, "r": 9, "act": "relu", "offset": True},
    "symmetric": {"t": 17, "r": 3, "act": "silu", "symmetric": True, "causal": True},
    "other layouts": {"t": 17, "s": 18, "b": 3, "layouts": True, "act": "relu", "causal": True},
    "the widest window": {"t": 3, "s": 17, "offset": True, "window": 2**31 - 1, "act": "relu"},
    "keys shared out": {
        "t": 2, "s": 40, "window": 20, "hidden": True, "bias": True, "act": "silu", "constants": {"SPLIT": 16},
    },
    "keys shared out, offsets": {
        "t": 2, "s": 40, "window": 20, "hidden": True, "bias": True, "act": "silu", "offset": True,
        "constants": {"SPLIT": 16},
    },
}  # fmt: skip
CASES = {"hyla": HYLA, "linear": LINEAR, "relational": RELATIONAL}
ALL = [(op, name) for op in OPS for name in CASES[op]]


def module(op, file):
    return importlib.import_module(f"polyhead.ops.{op}.triton.{file}")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Of linear attention, as small as a card takes them; states are read and written in several pieces."""
    monkeypatch.setattr(implementation("linear", "triton"), "CHUNK", 16)
    monkeypatch.setattr(module("linear", "kernels"), "WIDTH", {2: 16, 4: 16, 8: 16})


def other_layouts(x, last):
    """The same numbers with heads outside of rows, or with samples innermost."""
    return (
        x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        if last
        else x.transpose(1, 2).contiguous().transpose(1, 2)
    )


def make(op, case, dtype=torch.float64):
    """Tensors with gradients, and options."""
    case = {"s": case["t"], "causal": op == "linear", **case}
    sizes = {name: case[name] for name in ("t", "s", "b", "h", "g", "d", "e", "edges") if name in case}
    qkv, options = make_problem(**sizes, bias="offset" if case.get("bias") else None, dtype=dtype)
    shapes = {name: case[name] for name in ("offset", "r", "p", "symmetric") if name in case}
    tensors = [x.detach().to(DEVICE) for x in make_arguments(op, qkv, **shapes)]
    if case.get("layouts"):
        tensors[:5] = [other_layouts(x, last=n == 1) for n, x in enumerate(tensors[:5])]
    tensors = [x.requires_grad_() for x in tensors]
    if case.get("symmetric"):
        tensors[3] = tensors[2]
    options |= {name: case[name] for name in ("causal", "window", "scale", "normalise") if name in case}
    options |= {"relation_act" if op == "relational" else "act": case["act"]} if "act" in case else {}
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if case.get("hidden"):
        options["mask"] = (torch.rand(len(qkv[0]), 1, 1, case["s"] + 3, device=DEVICE) > 0.4)[..., 1 : case["s"] + 1]
        options["mask"][0] = False
        options["mask"] = options["mask"][..., :1] if case["hidden"] == "samples" else options["mask"]
    if options["bias"] is not None:
        options["bias"] = options["bias"].detach().requires_grad_()
    cotangent = torch.randn(*qkv[0].shape[:3], qkv[2].shape[3], dtype=dtype, device=DEVICE)
    return tensors, options, cotangent


def run(op, impl, tensors, options, cotangent):
    out = resolve(op, impl)(*tensors, **options)
    bias = [] if options.get("bias") is None else [options["bias"]]
    return [out, *torch.autograd.grad(out, [*tensors, *bias], cotangent)]


def both(op, tensors, options, cotangent):
    return [run(op, impl, tensors, options, cotangent) for impl in ("triton", "reference")]


@pytest.mark.parametrize(("op", "name"), ALL)
def test_kernels_equal_the_reference(monkeypatch, op, name):
    case = CASES[op][name]
    launches = module(op, "launches" if op == "relational" else "kernels")
    for constant, value in case.get("constants", {}).items():
        monkeypatch.setattr(launches, constant, value)
    if case.get("tile") == "halves":
        monkeypatch.setattr(
            launches, "tile", lambda kernel, _: launches.TileSettings(16, 16, 8, 1, halves=kernel == "keys")
        )
    elif "tile" in case:
        monkeypatch.setattr(launches, "tile", lambda *_: launches.TileSettings(*case["tile"], 8, 1))
    torch.manual_seed(len(name))
    tensors, options, cotangent = make(op, case)
    if case.get("layouts"):
        cotangent = cotangent[:, :, :, :1].expand_as(cotangent)  # as the gradient of a sum is
    came, wanted = both(op, tensors, options, cotangent)
    assert_close(came, wanted, rtol=1e-9, atol=1e-9)
    if case.get("hidden"):
        assert all((x[0] == 0).all() for x in came[: 1 + (5 if op == "relational" and "offset" not in case else 3)])
    if options["causal"]:
        assert (came[0][:, : max(0, case["t"] - case.get("s", case["t"]))] == 0).all()


def test_the_wide_case_is_cut():
    """Its gradients of queries and keys are sums over pieces; with four heads it was a single one."""
    (q, k, v), options, _ = make("hyla", HYLA["wide values, cut"])
    assert len([*module("hyla", "kernels").prepare(AttentionCall(q, k, v, **options)).pieces()]) == 2


def test_all_activations_are_among_the_cases():
    assert {case["act"] for case in RELATIONAL.values()} == set(RELATION_ACTS) - {"softmax"}


@pytest.mark.parametrize(("dtype", "small", "most"), [(torch.float32, 1e-3, 2e-6), (torch.float64, 0.03, 5e-15)])
@pytest.mark.parametrize("act", [act for act in RELATION_ACTS if act != "softmax"])
def test_small_relations_are_exact(act, dtype, small, most):
    """As those of small weights: 2 sigmoid(2 u) - 1 would have an error of 1e-4 of itself, four terms of a series near
    0.1 one of 1e-10."""
    case = {"t": 3, "s": 5, "h": 1, "g": 1, "act": act}
    tensors, options, _ = make("relational", case, dtype)
    tensors[2], tensors[4] = tensors[2].detach() * small, torch.zeros_like(tensors[4])
    outs = [resolve("relational", impl)(*tensors, **options) for impl in ("triton", "reference")]
    assert (outs[0] - outs[1]).norm() <= most * outs[1].norm()


def test_large_scores():
    """Each key tile raises the highest score by more than exp can hold: sums so far must be scaled down."""
    tensors, options, cotangent = make("relational", {"t": 3, "s": 40, "act": "relu"})
    ramp = torch.linspace(0, 2000, 42, dtype=torch.float64, device=DEVICE).expand(4, 42)
    for bias in (ramp, ramp.flip(1)):
        options["bias"] = bias.clone().requires_grad_()
        assert_close(*both("relational", tensors, options, cotangent), rtol=1e-9, atol=1e-9)


PRECISIONS = {
    "hyla": {"t": 33, "g": 4, "causal": True, "act": "relu"},
    "linear": {"t": 35},
    "relational": {"t": 33, "r": 4, "p": 8, "act": "silu", "causal": True},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(op, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    torch.manual_seed(1)
    tensors, options, cotangent = make(op, PRECISIONS[op] | {"d": 8, "e": 8}, dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = run(op, "reference", wide, options, cotangent.double())
    for x, y, z in zip(*both(op, tensors, options, cotangent), exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


# ------------------------------------------------------------------------------------------ sums are wider than numbers
def rising():
    """Keys of which every sixteenth is 1; values of which the first is 4096: in float16, 4096 + 1 is 4096."""
    k = torch.zeros(1, 80, 1, 1, dtype=torch.float16, device=DEVICE)
    k[:, ::16] = 1
    return k, k * (1 + 4095 * (k.cumsum(1) == 1))


def test_sums_of_hyla_are_not_in_half_precision():
    long, terms = rising()
    one, ones = torch.ones_like(long[:, :1]).requires_grad_(), torch.ones_like(long).requires_grad_()
    run = resolve("hyla", "triton")
    out = run(one, ones, terms, normalise="identity")
    assert out.item() == 4100
    assert torch.autograd.grad(out.sum(), one)[0].item() == 2 * 4100
    value = one.detach().clone().requires_grad_()
    dk, dv = torch.autograd.grad(run(ones, one, value, normalise="identity"), (one, value), terms)
    assert (dk.item(), dv.item()) == (2 * 4100, 4100)


def test_states_are_not_in_half_precision():
    """20 times 4096 is too much for float16."""
    (k, v), run = rising(), resolve("linear", "triton")
    assert run(torch.ones_like(k), k, v, causal=True)[0, -1].item() == 4100
    large = torch.full_like(k, 64)
    out = run(torch.full_like(k, 1e-3), large, large, causal=True)
    assert_close(out[0, -1].item(), 80 * 64 * 64 * 1e-3, rtol=1e-3, atol=0)


def test_sums_of_relations_are_not_in_half_precision():
    """The largest term first, then 79 that float16 would round away one tile at a time."""
    n, run = 80, resolve("relational", "triton")
    q, k = (torch.zeros(1, rows, 1, 1, dtype=torch.float16, device=DEVICE) for rows in (1, n))
    terms, weight = torch.full_like(k, 0.05), torch.zeros(1, 1, 1, dtype=torch.float16, device=DEVICE)
    terms[:, 0] = 2048
    mean = torch.tensor((2048 + 79 * terms[0, 1].item()) / n).half().item()
    assert run(q, k, q, k, terms, weight).item() == mean
    assert run(q, k, q + 1, terms, k, weight + 1).item() == mean


@pytest.mark.parametrize(("op", "split"), [("hyla", 128), ("relational", 128), ("relational", 16)])
def test_a_weight_is_as_exact_as_its_score_where_all_scores_are_large(monkeypatch, op, split):
    """They are 2^14 and a little more, without rounding; the log-sum-exp next to it would be off by up to 2^-10."""
    monkeypatch.setattr(module("relational", "launches"), "SPLIT", split)
    little = torch.arange(20.0, device=DEVICE) / 8
    k = torch.stack((torch.ones_like(little), little), 1)[None, :, None]
    q = torch.tensor([2.0**14, 1.0], device=DEVICE).expand(1, 3, 1, 2)
    sizes = [(1, 20, 1, 2)]  # of values, or of relations and symbols
    options = {"normalise": "softmax", "act": "identity"}
    if op == "relational":
        sizes, options = [(1, 3, 1, 2), *2 * sizes, (1, 2, 1)], {"relation_act": "identity"}
    tensors = [x.clone().requires_grad_() for x in (q, k, *(torch.randn(size, device=DEVICE) for size in sizes))]
    options, cotangent = options | {"scale": 1.0}, torch.randn(1, 3, 1, 2, device=DEVICE)
    came = run(op, "triton", tensors, options, cotangent)
    exact = run(op, "reference", [x.detach().double().requires_grad_() for x in tensors], options, cotangent.double())
    for n in (0, 3 if op == "hyla" else 5):  # the output and the gradient of values or symbols
        assert_close(came[n].double(), exact[n], rtol=2e-6, atol=2e-6)


def test_never_chosen_without_a_gpu(monkeypatch):
    q, k, v = make_problem(1, 1)[0]
    call = AttentionCall(q, k, v, causal=True, normalise="identity", q_rel=q, k_rel=k)
    triton = {op: implementation(op, "triton") for op in OPS}
    assert not any(impl.preferred(call) for impl in triton.values())
    cards = importlib.import_module("polyhead.ops.cards")
    for name, told in (("INTERPRETED", "takes CUDA tensors only"), ("TRITON", "needs triton, which is not installed")):
        monkeypatch.setattr(cards, name, False)
        assert {impl.unsupported_reason(call) for impl in triton.values()} == {told}


# ------------------------------------------------------------------------------------------------------------ compiled
@pytest.mark.thinned(2)
@pytest.mark.compile
@pytest.mark.parametrize("op", ["hyla", "relational"])
def test_one_graph_for_all_lengths(op):
    how = {"causal": True, "window": 7, "relation_act" if op == "relational" else "act": "relu"}

    runs = {impl: resolve(op, impl) for impl in ("triton", "reference")}

    def call(impl, bias, q, *rest):
        return runs[impl](q * 1.5, *rest, bias=bias, **how).sin()

    once = torch.compile(lambda *x: call("triton", *x), fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (5, 9):
        tensors, options, _ = make(op, {"t": t, "g": 4, "bias": True})
        leaves = options["bias"], *tensors
        outs = once(*leaves), call("reference", *leaves)
        assert_close(*outs)
        assert_close(*(torch.autograd.grad(out.sum(), leaves) for out in outs))


RULES = [("hyla", False), ("hyla", True), ("linear", True), ("relational", False), ("relational", True)]


@pytest.mark.compile
@pytest.mark.parametrize(("op", "full"), RULES)
def test_the_custom_op_keeps_the_rules(op, full):
    case = {"t": 3, "edges": (0, 1, 3)} if op == "linear" else {"t": 3, "s": 4, "bias": True, "hidden": True}
    (q, k, *more), options, _ = make(op, case)
    limits = {name: options[name] for name in ("bias", "mask", "cu_seqlens")} if full else {}
    named = {"q_rel": more[0], "k_rel": more[1], "v": more[2]} if op == "relational" else {"v": more[0]}
    call = packed(AttentionCall(q, k, **named, **limits))
    keywords = {"causal": True, "scale": 0.5, "normalise": "identity", "act": "identity"}
    keywords |= {"window": 3 if full else None, "act": "relu"} if op != "linear" else {}
    torch.library.opcheck(getattr(torch.ops.polyhead, f"{op}_triton"), call, keywords)
