"""The reference of every op: its equation by an independent oracle, its gradients, its one-line errors."""

import itertools
import random

import oracle
import pytest
import torch
from problems import VARIANTS, options_of, shape_of
from refusals import refusing
from rules import KERNELS_RUN
from some import some
from torch.testing import assert_close

import polyhead as ph
from polyhead.ops.latent_code import latent_code, relations
from polyhead.ops.registry import OPS, TENSORS, resolve
from polyhead.spec import MECHANISMS, NETWORKS, NORMALISE

BIASES, MASKS, BOTH = (None, "offset", "dense", "per_sample"), (None, "rows", "keys", "plane", "thin"), (False, True)
LIMITS = [((t, s), {}) for t, s in ((1, 4), (4, 4), (5, 3), (3, 5))]
LIMITS += [((5, 3), {"window": 1}), ((3, 5), {"window": 2})]
LIMITS += [((5, 5), {"edges": (0, 2, 2, 3, 5)}), ((5, 5), {"window": 2, "edges": (0, 1, 3)})]
CASES = list(itertools.product(LIMITS, BIASES, MASKS, BOTH, BOTH))
random.Random(0).shuffle(CASES)
GRID = [(op, n) for op, variants in VARIANTS.items() for n in range(len(variants))]
MIN_CASES = 64
"""The fewest cases of an op, over all its variants."""


@pytest.mark.parametrize(("op", "number"), GRID)
def test_equals_the_oracle(problem, arguments, op, number):
    """Output and gradients; both are 0 for a query without a visible key."""
    variant, variants = VARIANTS[op][number], len(VARIANTS[op])
    cases = CASES[number::variants][: 1 + MIN_CASES // variants]
    for n, (((t, s), limits), bias, mask, causal, keep) in some(enumerate(cases)):
        case = {"bias": bias, "mask": mask, "causal": causal, "keep": keep, "g": (1, 2, 4)[(n + number) % 3], **limits}
        qkv, options = problem(t, s, **case)
        options |= {"scale": (None, -0.3)[n % 2], **options_of(variant)}
        if variant.get("deep"):
            options["value_weight"] = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
        tensors = arguments(op, qkv, **shape_of(variant))
        out = resolve(op, "reference")(*tensors, **options)
        exact_out = oracle.answer(op, dict(zip(TENSORS[op], tensors, strict=True)), options)
        learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        grads, exact_grads = (
            torch.autograd.grad(y.square().sum() + y.sum(), [*tensors, *learned], allow_unused=True)
            for y in (out, exact_out)
        )
        for actual, expected in zip((out, *grads), (exact_out, *exact_grads), strict=True):
            assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text, case=case: f"{case}: {text}")
        if mask == "rows":
            assert (out[0, t // 2] == 0).all()
            assert (grads[0][0, t // 2] == 0).all()


@pytest.mark.parametrize("normalise", NORMALISE)
def test_codes_equal_the_oracle(problem, normalise):
    for ((t, s), limits), bias, mask, causal, _ in some(CASES[::8]):
        (q, k, _), options = problem(t, s, bias=bias, mask=mask, causal=causal, **limits)
        del options["keep"]
        code = latent_code(q, k, normalise=normalise, **options).detach()
        visible = oracle.visible((q.shape[0], q.shape[2], t, s), options)
        expected = oracle.code(q, k, visible, normalise, options).detach()
        assert_close(code, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(code == 0, expected == 0)


@pytest.mark.parametrize("op", ["softmax", "abstractor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["offset", "per_sample"])
def test_what_all_keys_share_in_a_bias_is_not_rounded_with_it(problem, op, dtype, kind):
    """A bias in float32, as under autocast: of -300.2 bfloat16 knows multiples of 2, and of -70,000 float16 nothing."""
    (q, k, v), options = problem(9, 9, bias=kind, mask="rows", d=8, e=8)
    bias = options["bias"].detach().float() - (70_000 if dtype == torch.float16 else 300.2)
    results = []
    for impl, compute_dtype in (("sdpa", dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).to(compute_dtype).requires_grad_() for x in (q, k, v)]
        learned = bias.clone().requires_grad_()
        out = resolve(op, impl)(*leaves, bias=learned, mask=options["mask"])
        grads = torch.autograd.grad(out.square().sum(), [*leaves, learned])
        results.append([x.detach().double() for x in (out, *grads)])
    for fused, reference, exact in zip(*results, strict=True):
        assert (fused - exact).norm() <= 2 * (reference - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_the_scale_of_scores_rounds_no_query(impl):
    """Rms over one head keeps the sign of a score, also of one near 0; 8 ** -0.5 is no number of bfloat16."""
    qkv = torch.randn(3, 4, 33, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    actual, expected = resolve("hyla", impl)(*qkv), resolve("hyla", "reference")(*qkv.double())
    assert_close(actual.double(), expected, rtol=0, atol=0.01 * expected.abs().max().item())


LARGE = {
    "softmax": lambda q, k, v, bias: (resolve("softmax")(q, k, v, bias=bias),),
    "abstractor": lambda q, k, v, bias: (resolve("abstractor")(q, k, v, bias=bias),),
    "hyla": lambda q, k, v, bias: (resolve("hyla")(q, k, v, bias=bias),),
    "pooled": lambda q, k, v, bias: (resolve("pooled")(q, k, v, bias=bias),),
    "relations": lambda q, k, v, bias: (
        relations(q, k, relation_act="softmax"),
        resolve("disentangled", "reference")(v, v, q, k, v, relation_act="softmax"),
    ),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 6), (torch.float16, 150)], ids=str)
def test_large_scores_of_half_precision_are_neither_rounded_nor_infinite(name, dtype, size):
    inputs = torch.randn(3, 2, 9, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs[:2] *= size
    rounded = LARGE[name](*inputs, torch.zeros(4, 17, dtype=dtype))
    exact = LARGE[name](*inputs.double(), torch.zeros(4, 17, dtype=torch.float64))
    for actual, expected in zip(rounded, exact, strict=True):
        assert_close(actual.double(), expected, rtol=0, atol=0.01 * expected.abs().max().item())


# ------------------------------------------------------------------------------------------------------- one line each
MISTAKES = [
    ("hyla", {"value_weight": torch.zeros(4, 5, 4)}, "e = 5 in v but 4 in value_weight (h e e) = (4, 5, 4)"),
    (
        "hyla",
        {"value_weight": torch.zeros(4, 5, 5)},
        "q, k, v and value_weight must have one dtype but have " + 3 * "torch.float64, " + "torch.float32",
    ),
    ("relational", {"symbols": torch.zeros(7, 2, 5)}, "t+s-1 = 6 but 7 in symbols (t+s-1 g e) = (7, 2, 5)"),
    *(
        (row.folder, {name: f"{valid[0]}x"}, f"unknown {name} '{valid[0]}x'; did you mean {valid[0]!r}?")
        for row in MECHANISMS
        for name, valid in row.choices.items()
    ),
]


@pytest.mark.parametrize(("op", "mistake", "message"), MISTAKES)
def test_mistakes_are_one_clear_line(problem, arguments, op, mistake, message):
    tensors = dict(zip(TENSORS[op], arguments(op, problem(3, 4)[0]), strict=True))
    with refusing(f"{OPS[op].name}: {message}"):
        resolve(op)(**tensors | mistake)


def test_mistakes_of_codes_are_one_clear_line():
    q, k = torch.zeros(2, 4, 4, 3), torch.zeros(2, 5, 2, 4)
    with refusing("latent_code: d = 3 in q but 4 in k (b s g d) = (2, 5, 2, 4)"):
        latent_code(q, k, normalise="softmax")
    with refusing("relations: unknown relation_act 'sofmax'; did you mean 'softmax'?"):
        relations(q, q, relation_act="sofmax")


PLAIN = {"normalise": "identity", "act": "identity"}
WEIGHT = {"value_weight": torch.zeros(4, 5, 5, dtype=torch.float64)}
REFUSED = [
    ("linear", "chunked", {"window": 2}, {}, "takes no window"),
    ("relational", "sdpa", {}, {"relation_act": "tanh"}, "takes relation_act='identity' only, not 'tanh'"),
    ("hyla", "triton", {"keep": True}, {}, "takes no keep"),
    ("hyla", "triton", {"bias": "dense"}, {}, "takes biases by offset (h t+s-1) only, not (1, 4, 4, 4)"),
    ("hyla", "triton", {"mask": "plane"}, {}, "takes masks of keys (b|1, 1, 1, s) only, not (4, 4)"),
    ("hyla", "triton", {}, {"normalise": "softmax"}, "takes normalise='rms_heads' or 'identity' only, not 'softmax'"),
    ("hyla", "triton", {}, {"act": "gelu"}, "takes act='relu' or 'identity' only, not 'gelu'"),
    ("hyla", "triton", {}, WEIGHT, "takes no value_weight"),
]
"""What kernels refuse; test_parity.py has the other implementations."""


@pytest.mark.parametrize(("op", "impl", "limits", "options", "message"), REFUSED)
def test_what_an_impl_does_not_take_it_refuses_in_one_line(problem, arguments, op, impl, limits, options, message):
    if impl == "triton" and not KERNELS_RUN:
        pytest.skip("needs triton's interpreter")
    qkv, problem_options = problem(4, 4, **limits)
    all_options = {**problem_options, **(PLAIN if op in ("linear", "hyla") else {}), **options}
    with refusing(f"{OPS[op].name}: impl '{impl}' {message}; use impl='auto' or 'reference'"):
        resolve(op, impl)(*arguments(op, qkv), **all_options)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_mean_over_keys_is_finite_where_their_sum_is_not(network):
    """The largest number of float16 is 65,504."""
    q, k, v, mask = torch.ones(1, 1, 2, 4), torch.ones(1, 4097, 2, 4), torch.ones(1, 4097, 2, 4), torch.ones(4097) > 0
    mask[0] = False
    y = ph.ops.pooled_attention(
        q.half(), k.half(), 20 * v.half(), mask=mask, pool="mean", network=network, impl="reference"
    )
    assert (y == 40).all()


def test_pooled_heads_have_codes_and_no_sum_of_codes():
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=ph.Pooled(2)))
    taps = ph.analysis.capture(model, task.batch("train", 2, seed=0, step=0))[0]
    assert ph.analysis.codes(taps, -1, -1).shape == (2, 2)
    with refusing("value_network: the output of these heads must be the sum of code times"):
        ph.analysis.value_network(taps, -1, -1)
    with refusing("swap_codes: unknown kind of heads 'pooled'"):
        ph.analysis.swap_codes(model, task)
