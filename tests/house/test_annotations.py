"""Annotations are checked at every call that differs from those that were checked before (tests/conftest.py)."""

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor


@jaxtyping.jaxtyped(typechecker=beartype)
def summed(x: Float[Tensor, "b t"], dim: int, parts: tuple = ()) -> Float[Tensor, "b"]:
    return x.sum(dim)


def test_a_call_is_checked_unless_it_repeats_one():
    for _ in range(3):
        assert summed(torch.ones(2, 3), 1).shape == (2,)
        with pytest.raises(jaxtyping.TypeCheckError):
            summed(torch.ones(2, 3), 0)  # another value, by which the result is of another shape
        for wrong in (torch.ones(2, 3, 4), torch.ones(2, 3).long(), [1.0]):
            with pytest.raises(jaxtyping.TypeCheckError):
                summed(wrong, 1)


def test_what_lies_in_a_list_counts():
    @jaxtyping.jaxtyped(typechecker=beartype)
    def first(of: list[Float[Tensor, "b"]]) -> Float[Tensor, "b"]:
        return of[0]

    assert first([torch.ones(2)]).shape == first([torch.ones(2)]).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError):
        first([torch.ones(2, 1)])
