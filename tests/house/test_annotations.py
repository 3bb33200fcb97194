"""Shapes are checked at every call that differs from the calls that were checked before (tests/conftest.py)."""

import itertools
import re

import jaxtyping
import pytest
import torch
from _pytest.mark.expression import Expression
from beartype import beartype
from jaxtyping import Float
from scripts import ROOT
from torch import Tensor

TESTS = re.compile(r"^\t(.*)\$\(BIN\)/python -m pytest -q -n 2 -m '(.+?)'(.*)$", re.M)
"""A call of pytest in the Makefile: what it sets, which markers it asks for, what it checks."""


@jaxtyping.jaxtyped(typechecker=beartype)
def summed(x: Float[Tensor, "b t"], dim: int, parts: tuple = ()) -> Float[Tensor, "b"]:
    return x.sum(dim)


@jaxtyping.jaxtyped(typechecker=beartype)
def first(of: list[Float[Tensor, "b"]]) -> Float[Tensor, "b"]:
    return of[0]


def test_a_call_is_checked_unless_it_repeats_one():
    for _ in range(3):
        assert first([torch.ones(2)]).shape == summed(torch.ones(2, 3), 1).shape == (2,)
        with pytest.raises(jaxtyping.TypeCheckError):
            first([torch.ones(2, 1)])  # what lies in a list counts
        with pytest.raises(jaxtyping.TypeCheckError):
            summed(torch.ones(2, 3), 0)  # another value, by which the result is of another shape
        for wrong in (torch.ones(2, 3, 4), torch.ones(2, 3).long(), [1.0]):
            with pytest.raises(jaxtyping.TypeCheckError):
                summed(wrong, 1)


def test_where_there_are_no_shapes_mypy_checks_alone():
    def product(n: int, by: int = 2) -> int:
        return by * n

    assert jaxtyping.jaxtyped(typechecker=beartype)(product) is product


@pytest.mark.parametrize(("compiled", "campaign"), [*itertools.product([False, True], repeat=2)])
def test_each_test_is_run_by_one_call_of_make_test_or_make_campaign(compiled, campaign):
    """Without checked annotations where its marker says so."""
    has = {"compile": compiled, "campaign": campaign}
    targets = re.split(r"^(?=\w+:)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    calls = {text.partition(":")[0]: TESTS.findall(text) for text in targets}
    for name in ("test", "campaign"):
        taken = [call for call in calls[name] if Expression.compile(call[1]).evaluate(lambda word: has[word])]
        assert len(taken) == ((name == "campaign") == campaign)
        assert all(
            ("JAXTYPING_DISABLE=1" in sets, "--jaxtyping" in checks) == (compiled, not compiled)
            for sets, _, checks in taken
        )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", range(5))
def test_the_other_cases_are_for_the_campaign(case, request):
    assert (request.node.get_closest_marker("campaign") is None) == (case in {3, 4})
