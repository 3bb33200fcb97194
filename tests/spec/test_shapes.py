"""@shaped: each error is one line with who, what is expected and what was given."""

import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import polyhead as ph
from polyhead import spec
from polyhead.spec.shapes import one_of, shaped


@shaped
def attend(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    *,
    bias: Float[Tensor, "#b #h t s"] | Float[Tensor, "h t+s-1"] | None = None,
    mask: Bool[Tensor, "#b #h #t #s"] | Bool[Tensor, "#t #s"] | None = None,
    positions: Int[Tensor, "b t"] | None = None,
) -> int:
    return 1


Q, K = torch.zeros(2, 5, 8, 4), torch.zeros(2, 7, 4, 4)


def test_what_fits_passes():
    assert attend(Q, K) == 1
    assert attend(Q, k=K, bias=torch.zeros(1, 8, 5, 7), mask=torch.zeros(2, 1, 1, 7).bool()) == 1
    positions = torch.zeros(2, 5, dtype=torch.int32)
    assert attend(Q, K, bias=torch.zeros(8, 11), mask=torch.zeros(5, 7).bool(), positions=positions) == 1
    assert attend(Q.double(), K.half()) == 1


MISTAKES = [
    ({"k": torch.zeros(2, 16, 3, 4)}, "8 heads in q but 3 in k (b s g d) = (2, 16, 3, 4)"),
    ({"k": torch.zeros(2, 16, 0, 4)}, "8 heads in q but 0 in k (b s g d) = (2, 16, 0, 4)"),
    ({"k": torch.zeros(2, 16, 4, 5)}, "d = 4 in q but 5 in k (b s g d) = (2, 16, 4, 5)"),
    ({"q": Q[0]}, "q must be (b t h d) but has shape (5, 8, 4)"),
    ({"bias": torch.zeros(8, 12)}, "t+s-1 = 11 but 12 in bias (h t+s-1) = (8, 12)"),
    ({"bias": torch.zeros(3, 8, 5, 7)}, "b = 2 in q but 3 in bias (#b #h t s) = (3, 8, 5, 7)"),
    ({"bias": torch.zeros(3, 4, 5)}, "bias must be (#b #h t s) or (h t+s-1) but has shape (3, 4, 5)"),
    ({"mask": torch.zeros(5, 7)}, "mask must be boolean, True where attention is allowed, but is torch.float32"),
    ({"mask": torch.ones(2, 7).bool()}, "t = 5 in q but 2 in mask (#t #s) = (2, 7); of keys it is mask[:, None, None]"),
    ({"q": Q.long()}, "q must be of a floating dtype but is torch.int64"),
    ({"positions": torch.zeros(2, 5)}, "positions must be of an integer dtype but is torch.float32"),
    ({"positions": torch.zeros(2, 5).byte()}, "positions must be of a signed integer dtype but is torch.uint8"),
    ({"k": [1, 2]}, "k must be a Tensor (b s g d) but is a list"),
    ({"k": K.numpy()}, "k must be a Tensor (b s g d) but is a ndarray"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_each_mistake_has_its_line(changes, message):
    with pytest.raises(ValueError, match="attend") as error:
        attend(**{"q": Q, "k": K} | changes)
    assert str(error.value) == f"attend: {message}"


def test_unknown_names_get_the_nearest():
    assert one_of("op", "act", "relu", spec.ACTS) == "relu"
    with pytest.raises(ValueError, match=r"op: unknown act 'rellu'; did you mean 'relu'\? \(choose from identity, "):
        one_of("op", "act", "rellu", spec.ACTS)
    with pytest.raises(ValueError, match=r"op: unknown act 7 \(choose from"):
        one_of("op", "act", 7, spec.ACTS)
    with pytest.raises(ValueError, match=r"^x: unknown mechanism 'cosine' \(choose from softmax, linear\)$"):
        one_of("x", "mechanism", "cosine", ["softmax", "linear"])  # half of its letters, and no other word


@pytest.mark.compile
def test_it_survives_compilation():
    compiled = torch.compile(lambda q, k: q.sum() * attend(q, k), fullgraph=True, backend="eager")
    assert compiled(Q, K).item() == 0
    with pytest.raises(Exception, match="8 heads in q but 3 in k"):
        compiled(Q, torch.zeros(2, 16, 3, 4))


@pytest.mark.compile  # where annotations are not checked
def test_a_call_refuses_unknown_names_and_positional_masks():
    layer = ph.MultiHeadAttention(8, ph.Softmax(2))
    x = torch.zeros(1, 3, 8)
    with pytest.raises(TypeError, match="MultiHeadAttention: only x and context may be positional arguments"):
        layer(x, x, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'attn_mask'"):
        layer(x, attn_mask=x)
