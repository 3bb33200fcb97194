"""Checks the answers to all questions of the five modules of mathematics by sympy's exact polynomials."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from sympy import ZZ
from sympy.polys.rings import ring

ORDERS = {"": 1, "first": 1, "second": 2, "third": 3}


def fault(module: str, question: str, answer: str) -> str | None:
    """What is wrong with an answer of one of the five modules, in words; None where it is right and well written."""
    try:
        return CHECKS[module](question, answer)
    except ValueError as error:
        return str(error)


def _value(text: str, names: Mapping[str, Any]) -> Any:
    """What an expression of numbers, letters and functions of one letter comes to."""
    try:
        return eval(text, {"__builtins__": {}}, dict(names))
    except (SyntaxError, NameError, TypeError):
        raise ValueError(f"{text!r} is no polynomial") from None


def _letters(text: str) -> dict[str, Any]:
    """The letters of a text as polynomials."""
    letters = sorted(set(re.findall("[a-z]", text)))
    return dict(zip(letters, ring(letters, ZZ)[1:], strict=True))


def _read(pattern: str, question: str) -> re.Match[str]:
    match = re.fullmatch(pattern, question)
    if match is None:
        raise ValueError(f"{question!r} is no question of this module")
    return match


def _integer(answer: str) -> int:
    if not re.fullmatch(r"0|-?[1-9]\d*", answer):
        raise ValueError(f"{answer!r} is no integer")
    return int(answer)


def _linear(question: str, answer: str) -> str | None:
    left, right, letter = _read(r"Solve (.*) = (.*) for ([a-z])\.", question).groups()

    def difference(x: int) -> int:
        return int(_value(left, {letter: x}) - _value(right, {letter: x}))

    root = _integer(answer)
    if difference(root):
        return f"{letter} = {answer} does not solve it"
    return None if difference(root + 1) else f"any {letter} solves it"


def _sequence(question: str, answer: str) -> str | None:
    pattern = r"(?:What is next in |What comes next: |What is the next term in )(-?\d+(?:, -?\d+)+)\?"
    front = [int(term) for term in _read(pattern, question)[1].split(", ")]
    following = 0
    while any(front):  # rows of differences: what follows is the sum of their ends
        if len(front) < 2:
            return "no rule shows in the sequence"
        following += front[-1]
        front = [b - a for a, b in itertools.pairwise(front)]
    return None if front and _integer(answer) == following else f"{answer} does not follow; {following} does"


def _derivative(question: str, answer: str) -> str | None:
    pattern = (
        r"(?:Find the |What is the )(?:(first|second|third) )?derivative of (.*?)(?: wrt ([a-z]))?[.?]|"
        r"Differentiate (.*?)(?: (?:wrt|with respect to) ([a-z]))?\."
    )
    nth, first, letter, second, other = _read(pattern, question).groups()
    expression = first or second
    names = _letters(expression)
    derivative = _value(expression, names)
    for _ in range(ORDERS[nth or ""]):
        derivative = derivative.diff(names[letter or other or min(names)])
    return _same(answer, derivative, names, "derivative")


def _sum(question: str, answer: str) -> str | None:
    let = r"Let ([a-z])\(([a-z])\) = ([^.]*)\. "
    groups = _read(rf"{let}{let}(?:What is|Calculate|Give|Determine) (.*)[.?]", question).groups()
    name, letter, text, other_name, other_letter, other_text, expression = groups
    functions: dict[str, Any] = {
        name: lambda x: _value(text, {letter: x}),
        other_name: lambda x: _value(other_text, {other_letter: x}),
    }
    free = _letters("".join(re.findall(r"\(([a-z])\)", expression)))
    return _same(answer, _value(expression, {**functions, **free}), free, "sum")


def _product(question: str, answer: str) -> str | None:
    expression = _read(r"Expand (.*)\.", question)[1]
    names = _letters(expression)
    return _same(answer, _value(expression, names), names, "product")


def _same(answer: str, expected: Any, names: Mapping[str, Any], name: str) -> str | None:
    """What is wrong with a polynomial: its value, or terms that are not collected, or factors and exponents 0 and 1."""
    if _value(answer, names) != expected:
        return f"{answer} is not the {name}"
    terms = re.split(r" [+-] ", answer.removeprefix("-"))
    count = len(expected.terms()) if hasattr(expected, "terms") else 1
    if len(terms) != max(count, 1) or any(re.search(r"^[01]\*|\*\*[01]\b", term) for term in terms):
        return f"{answer} is not well written"
    return None


CHECKS = {
    "algebra__linear_1d": _linear,
    "algebra__sequence_next_term": _sequence,
    "calculus__differentiate": _derivative,
    "polynomials__add": _sum,
    "polynomials__expand": _product,
}
