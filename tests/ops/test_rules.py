"""Rules that every impl of every op keeps: sizes of 0, biases of -inf, NaN behind a mask, whose gradient is known.

Kernels run in Triton's interpreter.  See "What every op promises" in docs/promises.md.
"""

import functools
import inspect
import itertools
import math

import pytest
import torch
from refusals import refused, refusing
from rules import ALL, REQUIRED_OPTIONS, options_of_scores, output_and_gradients, sample_count
from some import some
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.dispatch import choose
from polyhead.ops.latent_code import dense
from polyhead.ops.registry import IMPLS, OPS, TENSORS, code_of, resolve
from polyhead.spec import NORMALISE, SOFTMAX_AXIS

SENDERS = ("k", "v", "k_rel", "symbols")

pytestmark = pytest.mark.usefixtures("small_tiles")


def unless_refused(refusal, op, impl, *inputs):
    """Output and gradients, or None where the impl says that it does not take a limit."""
    try:
        return output_and_gradients(op, impl, *inputs)
    except ValueError as error:
        assert any(words in str(error) for words in refusal)  # noqa: PT017
        return None


NO_BIAS, NO_PAIRS = ("takes no bias", "takes biases by offset"), ("takes masks of keys",)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("op", "impl", "kind"),
    [(op, impl, kind) for op, impl in ALL for kind in (None, "offset", "dense")]
    + [(op, impl, "symbols by offset") for op, impl in ALL if "symbols" in TENSORS[op] and impl != "sdpa"],
)
def test_nothing_comes_of_nothing(problem, arguments, op, impl, kind):
    """No sample, no query or no key: outputs and gradients are empty or 0."""
    by_offset = kind == "symbols by offset"
    sizes = [(1, 3, 0), (1, 0, 3), (0, 3, 4)]
    if kind is None:
        sizes.append((2, 0, 0))  # without queries and keys there are -1 offsets
    for n, (b, t, s) in some(enumerate(sizes[: sample_count(impl, 1, len(sizes))])):
        qkv, options = problem(t, s, b=b, bias=None if by_offset else kind, causal=n % 2 == 0)
        biases = [] if options["bias"] is None else [options["bias"]]
        tensors, cotangent = arguments(op, qkv, offset=by_offset), torch.ones(b, t, 4, 5, dtype=torch.float64)
        options |= REQUIRED_OPTIONS.get(impl, {})
        actual = unless_refused(NO_BIAS, op, impl, tensors, options, cotangent, biases)
        if actual is None:
            continue
        for x, like in zip(actual, [cotangent, *tensors, *biases], strict=True):
            assert x.shape == like.shape
            assert (x == 0).all()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("op", "impl"), ALL)
def test_a_bias_of_minus_infinity_hides_like_a_mask(problem, arguments, op, impl):
    """Single pairs, and for one query all: code and gradients are exactly 0 there."""
    t, s, num_compared = 4, 5, 0
    for n, extra in some(enumerate(options_of_scores(op, impl))):
        for kind in ("offset",) if impl == "triton" else ("offset", "dense", "per_sample"):
            b = sample_count(impl)
            qkv, options = problem(t, s, bias=kind, mask=(None, "keys")[n % 2], causal=n % 3 == 0, b=b)
            options, tensors = options | extra, arguments(op, qkv)
            with torch.no_grad():
                options["bias"][torch.rand(options["bias"].shape) < 0.3] = -torch.inf
                options["bias"][..., t - 2 :] = -torch.inf  # by offset, all that the second query sees, and some more
                if kind != "offset":
                    options["bias"][..., 1, :] = -torch.inf
            bias = options["bias"]
            visible = bias != -torch.inf
            cotangent = torch.randn(b, t, 4, 5, dtype=torch.float64)
            actual = unless_refused(NO_BIAS, op, impl, tensors, options, cotangent, [bias])
            if actual is None:
                continue
            finite = torch.where(visible, bias, 0.0).detach().requires_grad_()
            mask = dense(visible, t, s)
            if options["mask"] is not None:
                mask = mask & options["mask"]
            masked = options | {"bias": finite, "mask": mask}
            expected = output_and_gradients(op, "reference", tensors, masked, cotangent, [finite])
            assert_close(actual, expected, rtol=1e-9, atol=1e-9)
            assert (actual[-1][~visible] == 0).all()
            assert (actual[0][:, 1] == 0).all()
            assert (actual[1][:, 1] == 0).all()
            num_compared += 1
    assert num_compared or impl == "chunked"


@pytest.mark.thinned(6)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
@pytest.mark.parametrize(("op", "impl"), ALL)
def test_what_a_mask_hides_from_all_may_be_nan_or_huge(problem, arguments, op, impl, value):
    """Padding, and a column of a mask of pairs; samples differ."""
    t, s, num_compared = 4, 6, 0
    for n, extra in some(enumerate(options_of_scores(op, impl))):
        b, mask = sample_count(impl), "keys" if n % 2 == 0 or impl in REQUIRED_OPTIONS else "rows"
        qkv, options = problem(t, s, mask=mask, causal=n % 3 == 1, b=b)
        options = options | extra
        options["mask"][0, ..., 1] = options["mask"][-1, ..., 3] = False
        tensors = arguments(op, qkv)
        nobody = ~options["mask"].any((1, 2))
        spoilt, zeros = list(tensors), list(tensors)
        for i, name in enumerate(TENSORS[op]):
            if name in SENDERS:
                for xs, fill in ((spoilt, value), (zeros, 0.0)):
                    xs[i] = tensors[i].detach().masked_fill(nobody[..., None, None], fill).requires_grad_()
        cotangent = torch.randn(b, t, 4, 5, dtype=torch.float64)
        actual = unless_refused(NO_PAIRS, op, impl, spoilt, options, cotangent)
        if actual is None:
            continue
        assert_close(actual, output_and_gradients(op, "reference", zeros, options, cotangent), rtol=1e-9, atol=1e-9)
        for name, grad in zip(TENSORS[op], actual[1:], strict=True):
            assert name not in SENDERS or (grad[nobody] == 0).all()
        num_compared += 1
    assert num_compared


@pytest.mark.parametrize("normalise", [*NORMALISE, "relations", "of a layer", "textbook"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_a_key_that_no_query_sees_may_hold_anything(normalise, fill):
    """Its code is 0, and so are the gradients that it gets and gives."""
    mask = torch.tensor([True, True, False, True, False])
    functions = {
        "relations": lambda q, k: ops.relations(q, k, relation_act="softmax", mask=mask),
        "of a layer": lambda q, k: code_of("hyla")(AttentionCall(q, k, k, masks=Masks(mask), normalise="rms_heads")),
        "textbook": lambda q, k: ops.scaled_dot_product_attention(q, k, k, mask[None]),
    }
    run = functions.get(normalise, lambda q, k: ops.latent_code(q, k, normalise=normalise, mask=mask))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 5, 5, 3, dtype=torch.float64) if normalise == "textbook" else torch.randn(2, 1, 5, 2, 3)
    hidden = ~mask[:, None] if normalise == "textbook" else ~mask[:, None, None]
    results = []
    for value in (fill, 0.0):
        leaves = q.clone().requires_grad_(), k.masked_fill(hidden, value).requires_grad_()
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(("op", "impl"), [*ALL, *((op, "auto") for op in IMPLS)])
def test_every_gradient_that_is_asked_for_comes_or_is_refused(problem, arguments, op, impl):
    """One argument at a time: alone it gets what it gets with all others."""
    qkv, _ = problem(5, 6, b=3)
    plain = [x.detach() for x in arguments(op, qkv)]
    values = dict(zip(TENSORS[op], plain, strict=True))
    values |= {"bias": torch.randn(4, 10).double(), "keep": torch.rand(1, 4, 5, 6).double()}
    values |= {"value_weight": torch.randn(4, 5, 5).double()} if op == "hyla" else {}
    cotangent = torch.randn(3, 5, 4, 5, dtype=torch.float64)
    for name in some(("keep",) if impl == "triton" else values):  # the grids of kernels have the others
        used = {**{x: values[x] for x in TENSORS[op]}, name: values[name].clone().requires_grad_()}
        gradients = []
        for backend in (impl, "reference"):
            try:
                out = resolve(op, backend)(**used, **REQUIRED_OPTIONS.get(impl, {}))
            except ValueError as error:
                assert name not in TENSORS[op]
                assert f"takes no {name}" in str(error)  # noqa: PT017
                assert impl not in ("auto", "reference")
                break
            gradients.append(torch.autograd.grad(out, used[name], cotangent))
        else:
            assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", IMPLS)
def test_a_scale_is_a_number(op):
    """Where annotations are not checked: its gradient would be lost."""
    q = torch.zeros(1, 1, 1, 1)
    scaled = AttentionCall(q, q, q, q_rel=q, k_rel=q, relation_weight=q[0], scale=torch.tensor(0.5, requires_grad=True))
    with pytest.raises(ValueError, match=r"scale must be a number but is a Tensor; multiply q by it$"):
        choose(OPS[op], scaled)
    with refusing("softmax_attention: softcap must be a number but is a Tensor"):
        ops.softmax_attention(q, q, q, softcap=torch.tensor(2.0))
    with refusing("softmax_attention: scale must be a finite number but is nan"):
        ops.softmax_attention(q, q, q, scale=math.nan)
    with refusing("hyla: causal must be True or False but is 'no'"):
        ops.hyla(q, q, q, causal="no")
    with refusing("hyla: mask must be on cpu, as q is, but is on meta"):
        ops.hyla(q, q, q, mask=torch.ones(q.shape[1], dtype=torch.bool, device="meta"))
    with refusing("latent_code: scale must be a number but is a Tensor; multiply q by it"):
        inspect.unwrap(ops.latent_code)(q, q, normalise="softmax", scale=scaled.scale)
    with refusing("linear_step: scale must be a number but is a Tensor; multiply q by it"):
        inspect.unwrap(ops.linear_step)(q, q, q, scale=scaled.scale)


LIMITED = {
    "hyla": lambda q, k, **limits: ops.hyla(q, k, k, **limits),
    "latent_code": functools.partial(ops.latent_code, normalise="softmax"),
    "relations": functools.partial(ops.relations, relation_act="tanh"),
}


@pytest.mark.parametrize("function", LIMITED)
def test_limits_that_cannot_be_are_refused(function):
    packed = {"cu_seqlens": torch.tensor([0, 1, 4], dtype=torch.int32)}
    for b, t, limits, message in [
        (1, 4, {"window": 0}, "window must be an integer of at least 1 but is 0"),
        (2, 4, packed, "with cu_seqlens b must be 1 and t = s but b = 2, t = 4, s = 4"),
        (1, 3, packed, "with cu_seqlens b must be 1 and t = s but b = 1, t = 3, s = 4"),
    ]:
        with refusing(f"{function}: {message}"):
            LIMITED[function](torch.zeros(b, t, 1, 1), torch.zeros(b, 4, 1, 1), **limits)


@pytest.mark.parametrize("function", LIMITED)
@pytest.mark.parametrize("edges", [(2, 2), (0, 3, 1, 4), (0, 2, 5), (3, 1)], ids=str)
def test_edges_of_packed_sequences_are_read(function, edges):
    """Lengths in place of edges gave numbers without a word.  In compiled code and under vmap nobody can read them."""
    x, wrong = torch.zeros(1, 4, 1, 1), torch.tensor(edges, dtype=torch.int32)

    def call(cu_seqlens):
        return LIMITED[function](x, x, cu_seqlens=cu_seqlens)

    with refusing(f"{function}: cu_seqlens must begin with 0, not decrease and end by t = 4 but is {list(edges)}"):
        call(wrong)
    torch.func.vmap(call)(wrong[None])
    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=True)(wrong)
    for right in ([0, 0, 4], [0, 2], [0], []):
        call(torch.tensor(right, dtype=torch.int32))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("small", [True, False], ids=["small tiles", "tiles"])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("op", "impl"), ALL)
def test_a_bias_that_all_keys_of_a_query_share_changes_nothing(problem, arguments, monkeypatch, op, impl, low, small):
    """Other libraries hide keys by such a bias; a query of padding then has no other keys."""
    if not small:
        monkeypatch.undo()  # a tile then has keys that its query does not see
    num_compared = 0
    choices = [{"normalise": n} for n in SOFTMAX_AXIS] if op in ("linear", "hyla", "pooled") else [{}]
    for n, (normaliser, t) in enumerate(itertools.product(choices, (3, 18))):  # few queries, and many
        qkv, options = problem(t, 20, dtype=torch.float32, causal=n % 3 > 0)
        with torch.no_grad():
            qkv[0].zero_()  # else -1e9 would round the scores
        tensors, bias, cotangent = arguments(op, qkv), torch.zeros(2, 1, t, 20), torch.randn(2, t, 4, 5)
        bias[:, :, 1] = low
        actual = unless_refused(("takes ",), op, impl, tensors, options | normaliser | {"bias": bias}, cotangent)
        if actual is not None:
            expected = output_and_gradients(op, "reference", tensors, options | normaliser, cotangent)
            assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            num_compared += 1
    assert num_compared or impl in ("triton", "chunked")


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_bias_is_added_in_float32(impl):
    """In bfloat16 256 + 1 is 256."""
    q = torch.full((1, 1, 1, 1), 16.0, dtype=torch.bfloat16)
    k, v = q.expand(1, 2, 1, 1), torch.tensor([0.0, 1.0], dtype=torch.bfloat16)[None, :, None, None]
    bias = torch.tensor([[0.0, 1.0]])
    code = ops.latent_code(q, k, normalise="softmax", bias=bias)
    assert_close(code[0, 0, 0].float(), bias[0].softmax(0), rtol=0.01, atol=0)
    out = ops.hyla(q, k, v, bias=bias, normalise="softmax", act="identity", impl=impl)
    assert_close(out.item(), bias[0].softmax(0)[1].item() ** 2, rtol=0.02, atol=0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("op", "impl"), ALL)
def test_an_output_may_be_written_to(problem, arguments, op, impl):
    """It is no view.  Where the backward pass reads it, autograd refuses, as after PyTorch's own kernels."""
    tensors, options = arguments(op, problem(4, 5)[0]), REQUIRED_OPTIONS.get(impl, {})
    plain = resolve(op, impl)(*tensors, **options)
    out = resolve(op, impl)(*tensors, **options).mul_(3)
    try:
        gradients = torch.autograd.grad(out.sum(), tensors)
    except RuntimeError as error:
        assert impl in ("native", "sdpa") or op == "pooled"  # the reference reads its maximum
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        return
    assert_close(gradients, torch.autograd.grad(3 * plain.sum(), tensors))


# ------------------------------------------------------------------------------------------------- kinds of arguments
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"bias": "none"}, r"softmax_attention: bias must be a Tensor \(.*\) but is a str"),
        ({"mask": [True]}, r"softmax_attention: mask must be a Tensor \(.*\) but is a list"),
        ({"v": None}, r"softmax_attention: v must be a Tensor \(.*\) but is a NoneType"),
    ],
)
def test_what_is_no_tensor_is_refused(arguments, line):
    x = torch.zeros(1, 2, 1, 4)
    refused(lambda: ops.softmax_attention(**{"q": x, "k": x, "v": x, **arguments}), line)
