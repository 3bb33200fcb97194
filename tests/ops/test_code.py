"""Scores and the latent code against loops; masks, groups, biases by offset."""

import itertools

import numpy as np
import pytest
import torch
from refusals import refusing
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


def test_mistakes_are_one_clear_line():
    q, k = torch.zeros(2, 4, 4, 3), torch.zeros(2, 5, 2, 4)
    with refusing("latent_code: d = 3 in q but 4 in k (b s g d) = (2, 5, 2, 4)"):
        ops.latent_code(q, k, normalise="softmax")
    with refusing("latent_code: unknown normalise 'rms'"):
        ops.latent_code(q, q, normalise="rms")


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
