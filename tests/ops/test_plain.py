"""softmax, silu and attention in the course's form, against their definitions in float64."""

import inspect
import math

import pytest
import torch
from problems import draw

import polyhead.ops
from polyhead.ops.textbook import scaled_dot_product_attention, silu, softmax

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_names_of_files_are_the_functions():
    """`ops/softmax/reference.py` and `ops/rope.py` must not hide the functions of the same name."""
    assert [name for name in polyhead.ops.__all__ if not inspect.isfunction(getattr(polyhead.ops, name))] == []
    assert polyhead.ops.softmax is softmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_at_logits_of_1e4(dtype, dim):
    x = torch.tensor([1e4, 1e4 - 8, -1e4, 0.0, 1e4], dtype=dtype)[:, None, None].expand(5, 2, 3).movedim(0, dim)
    expected = x.double().softmax(dim)
    actual = softmax(x, dim)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=torch.finfo(dtype).eps / 2, rtol=0)
    with pytest.raises(ValueError, match=r"^softmax: dim must be in \[-2, 2\) for x of shape \(3, 5\) but is 2$"):
        softmax(torch.zeros(3, 5), 2)


SHAPES = [
    ((5, 4), (7, 4), (7, 3), (5, 7)),
    ((4, 12, 16), (4, 16, 16), (4, 16, 16), (4, 12, 16)),
    ((2, 2, 12, 8), (2, 2, 16, 8), (2, 2, 16, 8), (2, 2, 12, 16)),
    ((2, 1, 3, 5, 4), (2, 2, 1, 7, 4), (1, 2, 3, 7, 3), (5, 7)),
    ((2, 3, 1, 4), (2, 3, 1, 4), (2, 3, 1, 4), (2, 1, 1, 1)),
    ((2, 5, 4), (7, 4), (7, 4), (3, 1, 5, 7)),
    ((2, 5, 4), (2, 7, 4), (2, 7, 4), (2, 1, 7)),
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
    single = scaled_dot_product_attention(q.float(), k.float(), v.float(), allowed if masked else None)
    torch.testing.assert_close(single.double(), expected, atol=1e-6, rtol=1e-4)
    half = (x.bfloat16() for x in (q, k, v))
    assert scaled_dot_product_attention(*half, allowed if masked else None).dtype == torch.bfloat16


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


@pytest.mark.parametrize(("given", "told"), MISTAKES)
def test_mistakes_are_one_line(given, told):
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {told}"):
        scaled_dot_product_attention(*given)


@pytest.mark.compile
def test_compiles_whole():
    def everything(q, k, v, mask):
        return silu(softmax(scaled_dot_product_attention(q, k, v, mask), dim=1))

    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend="eager")
    for t in (3, 6):
        q, k, v = (draw(2, 2, n, 8, seed=n, dtype=torch.float32) for n in (t, 5, 5))
        mask = draw(t, 5) > 0
        torch.testing.assert_close(compiled(q, k, v, mask), everything(q, k, v, mask))
