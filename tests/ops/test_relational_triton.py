"""Relational attention's kernels in Triton's interpreter: output and every gradient against the reference, in float64.

Only a few cases, each ugly in several ways at once: the interpreter takes half a second for one.
"""

import importlib

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead.ops import relational_attention
from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import INTERPRETED
from polyhead.ops.custom_op_rules import packed
from polyhead.ops.relational.triton import preferred, unsupported_reason
from polyhead.spec import RELATION_ACTS

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or triton's interpreter"
)
DEVICE = "cpu" if INTERPRETED else "cuda"

PLAIN = {"b": 2, "h": 4, "g": 2, "d": 3, "e": 5}
CASES = {
    "one pair": {"t": 1, "s": 1, "h": 1, "g": 1, "d": 1, "e": 1, "r": 1, "p": 1, "act": "sigmoid"},
    "odd sizes": {"t": 7, "s": 19, "h": 3, "g": 1, "d": 17, "r": 5, "p": 3, "act": "relu", "bias": True, "scale": -0.7},
    "more queries than keys": {"t": 19, "s": 7, "h": 5, "g": 5, "r": 9, "causal": True, "act": "tanh", "bias": True},
    "hidden keys": {"t": 19, "s": 33, "r": 2, "act": "gelu", "hidden": True, "causal": True},
    "hidden samples": {"t": 3, "s": 18, "b": 5, "act": "relu", "hidden": "samples"},
    "window": {"t": 33, "s": 33, "h": 2, "g": 2, "window": 5, "act": "silu", "bias": True},
    "packed": {"edges": (0, 0, 1, 12, 33), "h": 8, "g": 2, "causal": True, "act": "gelu_tanh", "bias": True},
    "packed, rows after the last": {
        "edges": (0, 20, 20, 31),
        "rows": 33,
        "window": 6,
        "act": "gelu_tanh",
        "bias": True,
    },
    "offsets": {"t": 33, "s": 19, "g": 4, "offset": True, "act": "silu", "bias": True},
    "offsets, causal window": {"t": 19, "s": 33, "g": 1, "offset": True, "causal": True, "window": 4, "act": "relu"},
    "offsets, packed": {"edges": (0, 5, 5, 21, 33), "offset": True, "act": "identity"},
    "parts": {"t": 3, "s": 17, "h": 12, "g": 6, "r": 9, "act": "tanh", "bias": True, "causal": True},
    "parts of offsets": {"t": 5, "s": 3, "h": 12, "g": 3, "r": 9, "act": "relu", "offset": True},
    "symmetric": {"t": 17, "s": 17, "r": 3, "act": "silu", "symmetric": True, "causal": True},
    "other layouts": {"t": 17, "s": 18, "b": 3, "layouts": True, "act": "relu", "causal": True},
    "the widest window": {"t": 3, "s": 17, "offset": True, "window": 2**31 - 1, "act": "relu"},
}


def make(case, problem, arguments, dtype=torch.float64):
    """Tensors with gradients, and options."""
    edges, shape = case.get("edges"), {key: case.get(key, PLAIN[key]) for key in PLAIN}
    t, s = (case.get("rows", edges[-1]),) * 2 if edges else (case["t"], case["s"])
    shape["b"] = 1 if edges else shape["b"]
    qkv, options = problem(t, s, bias="offset" if case.get("bias") else None, dtype=dtype, **shape)
    names = [key for key in ("offset", "r", "p", "symmetric") if key in case]
    tensors = arguments("relational", qkv, **{key: case[key] for key in names})
    tensors = [x.detach().to(DEVICE).requires_grad_() for x in tensors]
    if case.get("symmetric"):
        tensors[3] = tensors[2]
    if case.get("layouts"):  # heads outside of rows, the last dimension not the innermost
        tensors[:5] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors[:5]]
        tensors[1] = tensors[1].detach().mT.contiguous().mT.requires_grad_()
    options |= {key: case[key] for key in ("causal", "window", "scale") if key in case}
    options |= {"relation_act": case["act"], "cu_seqlens": None}
    if edges:
        options["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    if case.get("hidden"):
        options["mask"] = (torch.rand(shape["b"], 1, 1, s + 3, device=DEVICE) > 0.4)[..., 1 : s + 1]
        options["mask"][0] = False
        options["mask"] = options["mask"][..., :1] if case["hidden"] == "samples" else options["mask"]
    if options["bias"] is not None:
        options["bias"] = options["bias"].detach().to(DEVICE).requires_grad_()
    return tensors, options


def run(impl, tensors, options, cotangent):
    out = relational_attention(*tensors, **options, impl=impl)
    bias = [] if options["bias"] is None else [options["bias"]]
    return [out, *torch.autograd.grad(out, [*tensors, *bias], cotangent)]


def cotangent_of(tensors):
    return torch.randn(*tensors[0].shape[:3], tensors[4].shape[-1], dtype=tensors[0].dtype, device=DEVICE)


def test_all_activations_are_among_the_cases():
    assert {case["act"] for case in CASES.values()} == set(RELATION_ACTS) - {"softmax"}


MORE = ("window", "packed", "parts", "offsets")
"""Each beside another case with what makes it hard: for the campaign."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n in MORE)) for n in CASES])
def test_kernels_equal_the_reference(monkeypatch, problem, arguments, name):
    torch.manual_seed(len(name))
    tensors, options = make(CASES[name], problem, arguments)
    cotangent = cotangent_of(tensors)
    came, wanted = (run(impl, tensors, options, cotangent) for impl in ("triton", "reference"))
    for x, y in zip(came, wanted, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)
    if CASES[name].get("hidden"):
        assert (came[0][0] == 0).all()
        assert all((x[0] == 0).all() for x in came[1:6])
    if name == "more queries than keys":
        assert (came[0][:, :12] == 0).all()


def test_large_scores(problem, arguments):
    """Each key tile raises the highest score by more than exp can hold: sums so far must be scaled down."""
    torch.manual_seed(0)
    tensors, options = make({"t": 3, "s": 40, "act": "relu"}, problem, arguments)
    ramp = torch.linspace(0, 2000, 42, dtype=torch.float64, device=DEVICE).expand(4, 42)
    for bias in (ramp, ramp.flip(1)):
        options["bias"] = bias.clone().requires_grad_()
        cotangent = cotangent_of(tensors)
        for x, y in some(
            zip(*(run(impl, tensors, options, cotangent) for impl in ("triton", "reference")), strict=True)
        ):
            assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_single_precision(problem, arguments):
    torch.manual_seed(1)
    case = {"t": 19, "s": 33, "h": 3, "g": 1, "d": 7, "r": 5, "act": "gelu", "causal": True, "bias": True}
    tensors, options = make(case, problem, arguments, torch.float32)
    cotangent = cotangent_of(tensors)
    for x, y in some(zip(*(run(impl, tensors, options, cotangent) for impl in ("triton", "reference")), strict=True)):
        assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_the_reference(problem, arguments, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    torch.manual_seed(2)
    case = {"t": 33, "s": 33, "d": 8, "e": 8, "r": 4, "p": 8, "act": "silu", "causal": True}
    tensors, options = make(case, problem, arguments, dtype)
    cotangent = cotangent_of(tensors)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = run("reference", wide, options, cotangent.double())
    came, naive = (run(impl, tensors, options, cotangent) for impl in ("triton", "reference"))
    assert all(x.dtype == dtype for x in came)
    for x, y, z in zip(came, naive, exact, strict=True):
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


def test_sums_are_not_in_half_precision():
    """The largest term first, then 64 that float16 would round away one tile at a time."""
    n = 80
    q = torch.zeros(1, 1, 1, 1, dtype=torch.float16, device=DEVICE)
    k = torch.zeros(1, n, 1, 1, dtype=torch.float16, device=DEVICE)
    terms = torch.full_like(k, 0.05)
    terms[:, 0] = 2048
    weight = torch.zeros(1, 1, 1, dtype=torch.float16, device=DEVICE)
    out = relational_attention(q, k, q, k, terms, weight, impl="triton")
    assert out.item() == torch.tensor((2048 + 79 * terms[0, 1].item()) / n).half().item()
    out = relational_attention(q, k, q + 1, terms, k, weight + 1, impl="triton")
    assert out.item() == torch.tensor((2048 + 79 * terms[0, 1].item()) / n).half().item()


@pytest.mark.parametrize("r", [1, 2, 17])
def test_no_product_has_a_single_column(problem, arguments, r):
    """Triton compiles stacks of such products wrongly, and its interpreter sees nothing of it."""
    launches = importlib.import_module("polyhead.ops.relational.triton.launches")
    q, k, q_rel, k_rel, symbols, _ = arguments("relational", problem(3, 5)[0], r=r)
    masks = importlib.import_module("polyhead.ops.triton_tiles").limits(None, None, None, 3)
    call = launches.Call(q, k, q_rel, k_rel, symbols, None, masks, False, 1.0, "relu", False)
    widths = [call.plan(part).related.width_padded for part in call.parts()]
    assert widths
    assert min(widths) >= 2


@pytest.mark.parametrize("offset", [False, True])
def test_few_queries_have_their_keys_shared_out(monkeypatch, problem, arguments, offset):
    """One sample sees no key; the window leaves the first share without one."""
    launches = importlib.import_module("polyhead.ops.relational.triton.launches")
    monkeypatch.setattr(launches, "SPLIT", 16)
    grids = []
    monkeypatch.setattr(
        launches, "Launch", lambda kernel, grid, *rest: grids.append(grid) or launch(kernel, grid, *rest)
    )
    launch = importlib.import_module("polyhead.ops.triton_tiles").Launch
    case = {"t": 2, "s": 40, "window": 20, "hidden": True, "bias": True, "act": "silu", "offset": True}
    torch.manual_seed(3)
    tensors, options = make({name: x for name, x in case.items() if offset or name != "offset"}, problem, arguments)
    cotangent = cotangent_of(tensors)
    came, wanted = (run(impl, tensors, options, cotangent) for impl in ("triton", "reference"))
    assert grids[0] == (2, 3)
    for x, y in zip(came, wanted, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("b", "t", "programs"), [(8, 1, 256), (1, 1, 256), (8, 512, 256), (200, 1, 200)])
def test_decoding_fills_a_card(b, t, programs):
    launches = importlib.import_module("polyhead.ops.relational.triton.launches")
    masks = importlib.import_module("polyhead.ops.triton_tiles").limits(None, None, None, t)
    where = {"device": "meta", "dtype": torch.bfloat16}
    q, k, q_rel, k_rel = (torch.empty(b, n, 8, 64, **where) for n in (t, 32_768, t, 32_768))
    call = launches.Call(q, k, q_rel, k_rel, k, None, masks, True, 1.0, "relu", False)
    out = q, torch.empty(b, t, 8, 8, **where), torch.empty(b, 8, t, **where)
    (forward,) = launches.forward_launches(call, out, launches.shares(call))
    rows = forward.args[-1].q.rows
    assert forward.grid == (b * -(-t // rows), programs // (b * -(-t // 16)))


def test_samples_share_an_axis_of_the_grid_with_tiles(problem, arguments):
    """The other axes of a grid end at 65,535."""
    launches = importlib.import_module("polyhead.ops.relational.triton.launches")
    tiles = importlib.import_module("polyhead.ops.triton_tiles")
    where = {"device": "meta"}
    q, rel, stat = torch.empty(70_000, 33, 2, 4, **where), torch.empty(70_000, 33, 2, 4, **where), torch.empty(0)
    by_offset = torch.empty(1, 65, 2, 4, **where).expand(70_000, -1, -1, -1)
    stat = torch.empty(70_000, 2, 33, **where)
    masks = tiles.limits(None, None, None, 33)
    call = launches.Call(q, q, rel, rel, by_offset, None, masks, False, 1.0, "relu", True)
    above = launches.Above(q, rel, stat, stat)
    found = [*launches.forward_launches(call, (q, rel, stat))]
    found += launches.backward_launches(call, above, launches.Grads.empty(call))
    assert [launch.grid[0] for launch in found] == [3 * 70_000] * 3 + [5 * 70_000]
    assert all(n == 1 for launch in found for n in launch.grid[1:])


REFUSED = [
    ({"relation_act": "softmax"}, "no relation_act='softmax'"),
    ({"keep": torch.ones(1, 1, 3, 6)}, "no keep"),
    ({"bias": torch.zeros(1, 4, 3, 6)}, r"biases by offset \(h t\+s-1\) only, not \(1, 4, 3, 6\)"),
    ({"mask": torch.ones(3, 6, dtype=torch.bool)}, r"masks of keys \(b\|1, 1, 1, s\) only, not \(3, 6\)"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_refused_in_one_line(problem, arguments, changes, told):
    tensors = arguments("relational", problem(3, 6)[0])
    who = "relational_attention: impl 'triton' takes"
    with pytest.raises(ValueError, match=rf"^{who} {told}; use impl='auto' or 'reference'$"):
        relational_attention(*tensors, **changes, impl="triton")


def test_wide_heads_are_refused_and_nothing_is_chosen_without_a_gpu():
    q, rel = torch.zeros(1, 1, 2, 128), torch.zeros(1, 1, 2, 128)
    assert unsupported_reason(AttentionCall(q, q, q, q_rel=rel)) is None
    wider = torch.zeros(1, 1, 2, 129)
    for call in (
        AttentionCall(wider, wider, q, q_rel=rel),
        AttentionCall(q, q, wider, q_rel=rel),
        AttentionCall(q, q, q, q_rel=wider),
    ):
        assert unsupported_reason(call) == "takes widths of heads, symbols and relations up to 128 only, not 129"
    assert not preferred(AttentionCall(q, q, q))


def test_a_second_derivative_is_refused(problem, arguments):
    tensors = arguments("relational", problem(3, 3)[0])
    first = torch.autograd.grad(relational_attention(*tensors, impl="triton").sum(), tensors, create_graph=True)
    told = r"^relational_attention: impl 'triton' has no second derivative; use impl='reference'$"
    with pytest.raises(RuntimeError, match=told):
        torch.autograd.grad(first[0].sum(), tensors)


@pytest.mark.compile
def test_one_graph_for_all_lengths(problem, arguments):
    torch.manual_seed(3)
    f = torch.compile(
        lambda *x: relational_attention(*x[:6], bias=x[6], causal=True, window=7, impl="triton", relation_act="relu"),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for t in (5, 9):
        tensors, options = make({"t": t, "s": t, "bias": True, "act": "relu"}, problem, arguments)
        leaves = [*tensors, options["bias"]]
        options |= {"causal": True, "window": 7}
        out, wanted = f(*leaves), relational_attention(*tensors, **options, impl="reference")
        assert_close(out, wanted)
        assert_close(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves))


@pytest.mark.compile
@pytest.mark.parametrize("full", [False, True])
def test_the_custom_op_keeps_the_rules(problem, arguments, full):
    tensors, options = make({"t": 3, "s": 4, "bias": True, "hidden": True, "act": "relu"}, problem, arguments)
    q, k, q_rel, k_rel, symbols = tensors[:5]
    limits = {"bias": options["bias"], "mask": options["mask"]} if full else {}
    call = AttentionCall(q, k, symbols, q_rel=q_rel, k_rel=k_rel, **limits)
    window = 3 if full else None
    keywords = {"causal": True, "window": window, "scale": 0.5, "normalise": "softmax", "act": "relu"}
    torch.library.opcheck(torch.ops.polyhead.relational_triton, packed(call), keywords)


@pytest.mark.parametrize("split", [128, 16])
def test_a_weight_is_as_exact_as_its_score_where_all_scores_are_large(monkeypatch, split):
    """They are 2^14 and a little more, without rounding; the log-sum-exp next to it would be off by up to 2^-10."""
    monkeypatch.setattr(importlib.import_module("polyhead.ops.relational.triton.launches"), "SPLIT", split)
    s = 20
    little = torch.arange(s, device=DEVICE).float() / 8
    k = torch.stack((torch.ones_like(little), little), 1)[None, :, None].requires_grad_()
    q = torch.tensor([2.0**14, 1.0], device=DEVICE).expand(1, 3, 1, 2).clone().requires_grad_()
    sizes = (1, 3, 1, 2), (1, s, 1, 2), (1, s, 1, 2), (1, 2, 1)  # q_rel, k_rel, symbols, relation_weight
    tensors = [q, k, *(torch.randn(size, device=DEVICE).requires_grad_() for size in sizes)]
    options = {"relation_act": "identity", "scale": 1.0, "bias": None}
    cotangent = cotangent_of(tensors)
    came = run("triton", tensors, options, cotangent)
    exact = run("reference", [x.detach().double().requires_grad_() for x in tensors], options, cotangent.double())
    for n in (0, 5):  # the output and the gradient of the symbols
        assert_close(came[n].double(), exact[n], rtol=2e-6, atol=2e-6)
