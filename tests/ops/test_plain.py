"""Attention in the course's form: masks, rows without keys, batch dimensions that broadcast, errors.

tests/compat/test_course.py has the numbers of all functions in all dtypes.
"""

import inspect
import math

import pytest
import torch
from problems import draw

import polyhead.ops
from polyhead.ops.textbook import scaled_dot_product_attention, softmax


def test_names_of_files_are_the_functions():
    """`ops/softmax/reference.py` and `ops/rope.py` must not hide the functions of the same name."""
    assert [name for name in polyhead.ops.__all__ if not inspect.isfunction(getattr(polyhead.ops, name))] == []
    assert polyhead.ops.softmax is softmax


SHAPES = [
    ((5, 4), (7, 4), (7, 3), (5, 7)),
    ((2, 1, 3, 5, 4), (2, 2, 1, 7, 4), (1, 2, 3, 7, 3), (5, 7)),
    ((2, 5, 4), (7, 4), (7, 4), (3, 1, 5, 7)),
    ((2, 5, 4), (2, 7, 4), (2, 7, 4), (5, 1)),
    ((2, 5, 4), (2, 0, 4), (2, 0, 3), (5, 0)),
    ((2, 0, 4), (2, 5, 4), (2, 5, 4), (0, 5)),
    ((0, 5, 4), (0, 5, 4), (0, 5, 4), (5, 5)),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("q", "k", "v", "mask"), SHAPES)
def test_attention_by_the_definition(q, k, v, mask, masked):
    q, k, v = draw(*q, seed=1), draw(*k, seed=2), draw(*v, seed=3)
    allowed = draw(*mask, seed=5) > 0.5
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # A sum over the keys that a query may see; 0 if there are none.
    weights = (allowed if masked else 1) * torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    expected = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    actual = scaled_dot_product_attention(q, k, v, allowed if masked else None)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected))
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=0)


Q, K, V, MASK = torch.zeros(2, 5, 4), torch.zeros(2, 7, 4), torch.zeros(2, 7, 3), torch.ones(5, 7)
MISTAKES = [
    ((Q, K, V, MASK), "mask must be boolean, True where attention is allowed, but is torch.float32$"),
    ((Q, K, V, MASK.T.bool()), r"t = 5 in q but 7 in mask \(\.\.\. #t #s\) = \(7, 5\)$"),
    ((Q, torch.zeros(2, 7, 6), V), r"d = 4 in q but 6 in k \(\.\.\. s d\) = \(2, 7, 6\)$"),
    ((Q, K, V[:, :6]), r"s = 7 in k but 6 in v \(\.\.\. s e\) = \(2, 6, 3\)$"),
    ((Q, torch.zeros(3, 7, 4), V), r"batch dimensions do not broadcast: \(2,\), \(3,\), \(2,\)$"),
    ((Q, K.double(), V), "q, k and v must share a dtype but are torch.float32, torch.float64 and "),
    ((Q, K, V, torch.ones(7, dtype=torch.bool)), r"mask must be \(\.\.\. #t #s\) but has shape \(7,\)$"),
]


@pytest.mark.parametrize(("inputs", "message"), MISTAKES)
def test_mistakes_are_one_line(inputs, message):
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {message}"):
        scaled_dot_product_attention(*inputs)
