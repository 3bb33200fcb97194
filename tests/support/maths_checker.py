"""Checks the answers to all questions of the five modules of mathematics with independent code: exact integers, without
collecting terms.

Two polynomials are equal if they agree at a point so large that monomials cannot cancel there.  A derivative is the
coefficient of a truncated power series in the step, f(x + step) = f(x) + f'(x) step + f''(x) step² / 2 + ...

>>> fault("polynomials__expand", "Expand (2*x - 1)*(x + 3).", "2*x**2 + 5*x - 3")
>>> fault("polynomials__expand", "Expand (2*x - 1)*(x + 3).", "2*x**2 + 5*x - 4")
'2*x**2 + 5*x - 4 is not the product'
"""

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

ORDERS = {"": 1, "first": 1, "second": 2, "third": 3}
HUGE = 10**24  # above all coefficients
MOST = 16  # exponents of one letter stay below


class Series:
    """A power series in the step, cut after the third power: coefficients of step^0 to step^3."""

    def __init__(self, *coefficients: int) -> None:
        self.coefficients = (*coefficients, 0, 0, 0, 0)[:4]

    def __add__(self, other: "Series | int") -> "Series":
        pairs = zip(self.coefficients, _series(other).coefficients, strict=True)
        return Series(*(mine + theirs for mine, theirs in pairs))

    def __mul__(self, other: "Series | int") -> "Series":
        theirs = _series(other).coefficients
        return Series(*(sum(self.coefficients[i] * theirs[n - i] for i in range(n + 1)) for n in range(4)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Series":
        return self * -1

    def __sub__(self, other: "Series | int") -> "Series":
        return self + -other

    def __rsub__(self, other: int) -> "Series":
        return -self + other

    def __pow__(self, exponent: int) -> "Series":
        return math.prod([self] * exponent, start=Series(1))


def _series(value: Series | int) -> Series:
    return value if isinstance(value, Series) else Series(value)


def _power(base: Any, exponent: int) -> Any:
    if not 0 <= exponent < MOST:
        raise ValueError(f"exponents must be 0 to {MOST - 1} but one is {exponent}")
    return base**exponent


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: _power,
}


def value(text: str, names: Mapping[str, Any]) -> Any:
    """What an expression of numbers, letters and functions of one letter comes to.  ValueError for anything else."""

    def of(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
            return names[node.func.id](of(node.args[0]))
        raise ValueError(f"{text!r} is no polynomial")

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError, TypeError):
        raise ValueError(f"{text!r} is no polynomial") from None


def fault(module: str, question: str, answer: str) -> str | None:
    """What is wrong with an answer of one of the five modules, in words; None where it is right and well written."""
    try:
        return CHECKS[module](question, answer)
    except ValueError as error:
        return str(error)


def _read(pattern: str, question: str) -> re.Match[str]:
    found = re.fullmatch(pattern, question)
    if found is None:
        raise ValueError(f"{question!r} is no question of this module")
    return found


def _integer(answer: str) -> int:
    if not re.fullmatch(r"0|-?[1-9]\d*", answer):
        raise ValueError(f"{answer!r} is no integer")
    return int(answer)


def _linear(question: str, answer: str) -> str | None:
    left, right, letter = _read(r"Solve (.*) = (.*) for ([a-z])\.", question).groups()

    def rest(x: int) -> int:
        return int(value(left, {letter: x}) - value(right, {letter: x}))

    root = _integer(answer)
    if rest(root):
        return f"{letter} = {answer} does not solve it"
    return None if rest(root + 1) else f"any {letter} solves it"


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
    expression, order = first or second, ORDERS[nth or ""]
    letters = sorted(set(re.findall("[a-z]", expression)))
    letter = letter or other or letters[0]
    point = _point(letters)
    stepped: dict[str, Any] = {**point, letter: Series(point.get(letter, HUGE), 1)}
    found = _series(value(expression, stepped)).coefficients[order] * math.factorial(order)
    _check_form(answer)
    return None if value(answer, point) == found else f"{answer} is not the derivative"


def _sum(question: str, answer: str) -> str | None:
    let = r"Let ([a-z])\(([a-z])\) = ([^.]*)\. "
    found = _read(rf"{let}{let}(?:What is|Calculate|Give|Determine) (.*)[.?]", question).groups()
    names: dict[str, Any] = {}
    for name, letter, text in (found[:3], found[3:6]):
        names[name] = lambda x, letter=letter, text=text: value(text, {letter: x})
    free = set(re.findall(r"\(([a-z])\)", found[6]))
    point = _point(sorted(free))
    _check_form(answer)
    return None if value(answer, point) == value(found[6], {**names, **point}) else f"{answer} is not the sum"


def _product(question: str, answer: str) -> str | None:
    expression = _read(r"Expand (.*)\.", question)[1]
    point = _point(sorted(set(re.findall("[a-z]", expression))))
    _check_form(answer)
    return None if value(answer, point) == value(expression, point) else f"{answer} is not the product"


def _point(letters: list[str]) -> dict[str, int]:
    """Where each monomial of these letters is a power of HUGE of its own."""
    return {letter: HUGE ** (MOST**i) for i, letter in enumerate(letters)}


_TERM = re.compile(r"(?:(\d+)(?:\*|$))?((?:[a-z](?:\*\*\d+)?(?:\*|$))*)")


def _check_form(answer: str) -> None:
    """Raise ValueError unless terms are collected, in descending order, without factors or exponents 0 and 1."""
    words = re.split(r" ([+-]) ", answer)
    signs = ["-" if words[0].startswith("-") else "+", *words[1::2]]
    keys, constant = [], False
    letters = sorted(set(re.findall("[a-z]", answer)))
    for word in (words[0].removeprefix("-"), *words[2::2]):
        found = _TERM.fullmatch(word)
        zero = word.startswith("0") and answer != "0"
        if not word or found is None or word.endswith("*") or zero:
            raise ValueError(f"{answer!r} is not well written: {word!r}")
        powers = {f[0]: int(f[3:] or 1) for f in re.split(r"(?<!\*)\*(?!\*)", found[2].rstrip("*")) if f}
        if (powers and found[1] == "1") or re.search(r"\*\*[01]\b", word):
            raise ValueError(f"{answer!r} is not well written: {word!r}")
        keys.append(tuple(powers.get(letter, 0) for letter in letters))
        constant = not powers
    swapped = len(keys) == 2 and signs == ["+", "-"] and not any(keys[0]) and sum(k > 0 for k in keys[1]) == 1
    spared = len(keys) == 2 and signs == ["-", "+"] and constant and sum(k > 0 for k in keys[0]) == 1
    ordered = all(a > b for a, b in itertools.pairwise(keys))
    if not (ordered or swapped) or spared:
        raise ValueError(f"{answer!r} is not well written: the order of its terms")


CHECKS = {
    "algebra__linear_1d": _linear,
    "algebra__sequence_next_term": _sequence,
    "calculus__differentiate": _derivative,
    "polynomials__add": _sum,
    "polynomials__expand": _product,
}
