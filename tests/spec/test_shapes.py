"""@shaped: each mistake is one line that says who, what was wanted and what came."""

import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead import spec
from polyhead.spec.shapes import one_of, shaped


@shaped
def attend(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    *,
    bias: Float[Tensor, "#b #h t s"] | Float[Tensor, "h t+s-1"] | None = None,
    mask: Bool[Tensor, "#b #h #t #s"] | Bool[Tensor, "#t #s"] | None = None,
    where: Int[Tensor, "b t"] | None = None,
) -> int:
    return 1


Q, K = torch.zeros(2, 5, 8, 4), torch.zeros(2, 7, 4, 4)


def test_what_fits_passes():
    assert attend(Q, K) == 1
    assert attend(Q, k=K, bias=torch.zeros(1, 8, 5, 7), mask=torch.zeros(2, 1, 1, 7).bool()) == 1
    assert (
        attend(Q, K, bias=torch.zeros(8, 11), mask=torch.zeros(5, 7).bool(), where=torch.zeros(2, 5, dtype=torch.int32))
        == 1
    )
    assert attend(Q.double(), K.half()) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: attend(Q, torch.zeros(2, 16, 3, 4)), "attend: 8 heads in q but 3 in k (b s g d) = (2, 16, 3, 4)"),
        (lambda: attend(Q, torch.zeros(2, 16, 0, 4)), "attend: 8 heads in q but 0 in k (b s g d) = (2, 16, 0, 4)"),
        (lambda: attend(Q, torch.zeros(2, 16, 4, 5)), "attend: d = 4 in q but 5 in k (b s g d) = (2, 16, 4, 5)"),
        (lambda: attend(Q, torch.zeros(3, 16, 4, 4)), "attend: b = 2 in q but 3 in k (b s g d) = (3, 16, 4, 4)"),
        (lambda: attend(Q[0], K), "attend: q must be (b t h d) but has shape (5, 8, 4)"),
        (lambda: attend(Q, K, bias=torch.zeros(8, 12)), "attend: t+s-1 = 11 but 12 in bias (h t+s-1) = (8, 12)"),
        (
            lambda: attend(Q, K, bias=torch.zeros(3, 8, 5, 7)),
            "attend: b = 2 in q but 3 in bias (#b #h t s) = (3, 8, 5, 7)",
        ),
        (
            lambda: attend(Q, K, mask=torch.zeros(5, 7)),
            "attend: mask must be boolean, True where looking is allowed, but is torch.float32",
        ),
        (lambda: attend(Q, K, mask=torch.zeros(5, 6).bool()), "attend: s = 7 in k but 6 in mask (#t #s) = (5, 6)"),
        (lambda: attend(Q.long(), K), "attend: q must be of a floating dtype but is torch.int64"),
        (
            lambda: attend(Q, K, where=torch.zeros(2, 5)),
            "attend: where must be of an integer dtype but is torch.float32",
        ),
        (lambda: attend(Q, [1, 2]), "attend: k must be a Tensor (b s g d) but is a list"),
        (lambda: attend(Q, K.numpy()), "attend: k must be a Tensor (b s g d) but is a ndarray"),
    ],
)
def test_each_mistake_has_its_line(call, text):
    with pytest.raises(ValueError, match="attend") as error:
        call()
    assert str(error.value) == text


def test_a_module_is_called_by_its_class():
    class Layer:
        @shaped
        def forward(self, x: Float[Tensor, "b t m"]) -> None: ...

    Layer.forward.__qualname__ = "Layer.forward"
    with pytest.raises(ValueError, match=r"x must be \(b t m\)"):
        Layer().forward(torch.zeros(3))


def test_unknown_names_get_the_nearest():
    assert one_of("op", "act", "relu", spec.ACTS) == "relu"
    with pytest.raises(
        ValueError, match=r"op: unknown act 'rellu'; did you mean 'relu'\? \(choose from identity, relu"
    ):
        one_of("op", "act", "rellu", spec.ACTS)
    with pytest.raises(ValueError, match=r"op: unknown act 7 \(choose from"):
        one_of("op", "act", 7, spec.ACTS)


@pytest.mark.compile
def test_it_survives_compilation():
    compiled = torch.compile(lambda q, k: q.sum() * attend(q, k), fullgraph=True, backend="eager")
    assert compiled(Q, K).item() == 0
    with pytest.raises(Exception, match="8 heads in q but 3 in k"):
        compiled(Q, torch.zeros(2, 16, 3, 4))
