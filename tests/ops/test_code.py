"""Scores and the latent code against loops; masks, groups, biases by offset."""

import itertools

import numpy as np
import pytest
import torch
from some import some
from torch.testing import assert_close

from loops import Loops
from polyhead import ops
from polyhead.ops.call import AttentionCall
from polyhead.ops.dispatch import code_of
from polyhead.spec import NORMALISE

CASES = list(itertools.product((None, "offset", "dense", "per_sample"), (None, "rows", "keys", "plane"), (False, True)))


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 4), (5, 3), (3, 5), (5, 5)])
def test_the_code_equals_the_loops(problem, normalise, t, s):
    torch.manual_seed(t * 10 + s)
    for n, (bias, mask, causal) in some(enumerate(CASES[t % 2 :: 2])):
        limits = {"window": (None, 1, 3)[n % 3], "edges": (0, 2, 2, 3, 5) if t == s == 5 else None}
        (q, k, v), options = problem(t, s, bias=bias, mask=mask, causal=causal, **limits)
        del options["keep"]
        code = ops.latent_code(q, k, normalise=normalise, **options)
        wanted = Loops(q, k, v, **options).code(normalise)
        assert_close(code.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)
        assert np.array_equal(code.detach().numpy() == 0, wanted == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_are_taken_in_float32(dtype):
    """The square of a score of 1e3 overflows float16."""
    q = torch.tensor([1e3, -500.0], dtype=dtype)[None, None, :, None]
    k = torch.ones(1, 1, 2, 1, dtype=dtype)
    code = ops.latent_code(q, k, normalise="rms_heads").flatten().double()
    wanted = torch.tensor([1e3, -500.0], dtype=torch.float64) / (1.25e6 / 2) ** 0.5
    assert_close(code, wanted, rtol=5e-3, atol=0)


BAD = [
    ({"normalise": "rms"}, "latent_code: unknown normalise 'rms'"),
    ({"k": (2, 5, 2, 4)}, "latent_code: d = 3 in q but 4 in k (b s g d) = (2, 5, 2, 4)"),
    ({"k": (2, 5, 3, 3)}, "latent_code: 4 heads in q but 3 in k (b s g d) = (2, 5, 3, 3)"),
    ({"bias": (4, 7)}, "latent_code: t+s-1 = 8 but 7 in bias (h t+s-1) = (4, 7)"),
    ({"bias": (3, 4, 5)}, "latent_code: bias must be (#b #h t s) or (h t+s-1) but has shape (3, 4, 5)"),
    ({"mask": (3, 5)}, "latent_code: t = 4 in q but 3 in mask (#t #s) = (3, 5)"),
    (
        {"float_mask": (4, 5)},
        "latent_code: mask must be boolean, True where attention is allowed, but is torch.float32",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text[13:45] for _, text in BAD])
def test_mistakes_are_one_clear_line(change, text):
    arguments = {"q": torch.zeros(2, 4, 4, 3), "k": torch.zeros(2, 5, 2, 3), "normalise": "softmax"}
    for name, value in change.items():
        if name == "float_mask":
            arguments["mask"] = torch.ones(value)
        elif name == "mask":
            arguments["mask"] = torch.ones(value, dtype=torch.bool)
        else:
            arguments[name] = value if isinstance(value, str) else torch.zeros(value)
    with pytest.raises(ValueError, match=r"^latent_code") as caught:
        ops.latent_code(**arguments)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("normalise", [*NORMALISE, "relations", "of a layer", "textbook"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_a_key_that_no_query_sees_may_hold_anything(normalise, fill):
    """Its code is 0, and so are the gradients that it gets and gives."""
    mask = torch.tensor([True, True, False, True, False])
    functions = {
        "relations": lambda q, k: ops.relations(q, k, relation_act="softmax", mask=mask),
        "of a layer": lambda q, k: code_of("hyla")(AttentionCall(q, k, k, mask=mask, normalise="rms_heads")),
        "textbook": lambda q, k: ops.scaled_dot_product_attention(q, k, k, mask[None]),
    }
    run = functions.get(normalise, lambda q, k: ops.latent_code(q, k, normalise=normalise, mask=mask))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 5, 5, 3, dtype=torch.float64) if normalise == "textbook" else torch.randn(2, 1, 5, 2, 3)
    hidden = ~mask[:, None] if normalise == "textbook" else ~mask[:, None, None]
    found = []
    for value in (fill, 0.0):
        leaves = q.clone().requires_grad_(), k.masked_fill(hidden, value).requires_grad_()
        found.append([out := run(*leaves), *torch.autograd.grad(out.square().sum(), leaves)])
    for came, wanted in zip(*found, strict=True):
        assert_close(came, wanted)
