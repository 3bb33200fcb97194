"""Questions of five modules of school mathematics, in the text format of Saxton et al. 2019, by our own generators.

    algebra__linear_1d           Solve 15*j - 64 = 38*j + 5 for j.                          -3
    algebra__sequence_next_term  What is next in 480, 987, 1494?                            2001
    calculus__differentiate      Find the second derivative of 72*a**5 + a**3 - 23*a.       1440*a**3 + 6*a
    polynomials__add             Let i(q) = 7 - 14*q. Let l(c) = 2 - 5*c. Determine -3*i(b) + 8*l(b).     2*b - 5
    polynomials__expand          Expand (2*x - 1)*(x + 4*x + 3).                            10*x**2 + x - 3

A question has a number of `parts` and a largest number.  An extrapolation split has more parts, or larger numbers.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")
# Maps exponents to coefficients: 3*a**2*x - 1 over the letters (a, x) is {(2, 1): 3, (0, 0): -1}.
Polynomial = dict[tuple[int, ...], int]

LETTERS = "abcdfghijklmnopqrstuvwxyz"  # without e, which is a constant
NTH = ("first", "second", "third")
TRIES = 10_000


@dataclass(frozen=True)
class Level:
    """The difficulty of questions.

    Attributes:
        parts: The range of the module's count: terms of an equation (linear_1d), degree of a sequence
            (sequence_next_term), terms after collecting (differentiate: of the expression; add: of the first
            polynomial), factors (expand).
        size: An upper bound on the numbers in a question.
        least: The largest number of a question must exceed it.
        degree: Largest exponent.
        variables: Most letters.
        order: Highest derivative.
        loose: Most terms that are written as the sum of two terms.
    """

    parts: tuple[int, int]
    size: int
    least: int = 0
    degree: int = 1
    variables: int = 1
    order: int = 1
    loose: int = 0

    def longer(self) -> "Level":
        """More parts than in training; numbers of the same size."""
        return replace(self, parts=(self.parts[1] + 1, self.parts[1] + 1))

    def larger(self) -> "Level":
        """As many parts as in training; the largest number exceeds all numbers of training."""
        return replace(self, least=self.size, size=10 * self.size)


LEVELS: dict[str, dict[str, Level]] = {
    "algebra__linear_1d": {"easy": Level((2, 3), 100), "medium": Level((2, 4), 2_500), "hard": Level((3, 5), 90_000)},
    "algebra__sequence_next_term": {
        "easy": Level((1, 1), 100),
        "medium": Level((1, 2), 1_000),
        "hard": Level((1, 3), 100_000),
    },
    "calculus__differentiate": {
        "easy": Level((1, 3), 20, degree=4),
        "medium": Level((2, 4), 100, degree=5, variables=2, order=2),
        "hard": Level((2, 5), 1_000, degree=5, variables=3, order=3),
    },
    "polynomials__add": {
        "easy": Level((1, 2), 20, degree=2),
        "medium": Level((1, 3), 100, degree=3, loose=1),
        "hard": Level((2, 4), 1_000, degree=4, loose=2),
    },
    "polynomials__expand": {
        "easy": Level((2, 2), 9, degree=1),
        "medium": Level((2, 2), 30, degree=2, loose=2),
        "hard": Level((2, 3), 100, degree=3, loose=4),
    },
}
DIFFICULTIES = ("easy", "medium", "hard")


class StableRandom:
    """Random choices from `random.random()` alone, the only method that Python guarantees to be stable."""

    def __init__(self, seed: int) -> None:
        self.roll = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self.roll() * count)

    def between(self, low: int, high: int) -> int:
        return low + int(self.roll() * (high - low + 1))

    def signed(self, limit: int) -> int:
        """A number of magnitude 1 to `limit`, of either sign."""
        value = int(self.roll() * 2 * limit) - limit
        return value + (value >= 0)  # never 0

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.roll() * len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` of `items`, in random order."""
        left = list(items)
        drawn = []
        for _ in range(count):
            drawn.append(left.pop(int(self.roll() * len(left))))
        return drawn


def question(module: str, level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """A question of `level` and its answer; None if the draw failed and must be repeated."""
    pair = MAKERS[module](level, dice)
    if pair is None:
        return None
    largest = max(map(int, re.findall(r"\d+", pair[0])), default=0)
    if level.least < largest <= level.size:
        return pair
    return None


# ----------------------------------------------------------------------------------------------------------------- text
def polynomial_text(polynomial: Polynomial, letters: Sequence[str]) -> str:
    """Terms in descending lexical order of their exponents; but `2 - 3*x` to avoid a leading minus.

    >>> polynomial_text({(2, 1): 3, (0, 2): -1, (0, 0): 5}, ("a", "x"))
    '3*a**2*x - x**2 + 5'
    """
    terms = sorted(((key, value) for key, value in polynomial.items() if value), reverse=True)
    if len(terms) == 2:
        (first, first_value), (last, last_value) = terms
        has_one_letter = len(first) - first.count(0) == 1
        if first_value < 0 < last_value and not any(last) and has_one_letter:
            terms.reverse()
    return joined([term_text(value, key, letters) for key, value in terms])


def term_text(value: int, exponents: tuple[int, ...], letters: Sequence[str]) -> str:
    """`-3*a**2*x`; a factor of 1 is not written."""
    powers = []
    for letter, exponent in zip(letters, exponents, strict=True):
        if exponent == 1:
            powers.append(letter)
        elif exponent:
            powers.append(f"{letter}**{exponent}")
    if not powers:
        return str(value)
    product = "*".join(powers)
    if value == 1:
        return product
    if value == -1:
        return f"-{product}"
    return f"{value}*{product}"


def joined(terms: Sequence[str]) -> str:
    """The sum of terms: `x - 2`, not `x + -2`; an empty sum is 0."""
    return " + ".join(terms).replace("+ -", "- ") or "0"


# ---------------------------------------------------------------------------------------------------------- polynomials
def _monomials(level: Level, dice: StableRandom, count: int, variables: int = 1) -> list[tuple[int, ...]]:
    """`count` distinct tuples of exponents, or all if there are fewer."""
    if variables == 1:
        return [(exponent,) for exponent in dice.some(range(level.degree + 1), min(count, level.degree + 1))]
    monomials: list[tuple[int, ...]] = []
    while len(monomials) < count:
        exponents = tuple(dice.below(level.degree + 1) for _ in range(variables))
        if exponents not in monomials:
            monomials.append(exponents)
    return monomials


def _loose(polynomial: Polynomial, letter: str, pieces: int, size: int, dice: StableRandom) -> str:
    """The text of a polynomial in one letter, in random order; `pieces` terms are written as the sum of two."""
    if not pieces:
        return polynomial_text(polynomial, (letter,))
    terms = list(polynomial.items())
    for _ in range(pieces):
        exponents, value = terms.pop(dice.below(len(terms)))
        part = dice.signed(size)
        terms += [(exponents, part), (exponents, value - part)]
    return joined([term_text(value, exponents, (letter,)) for exponents, value in dice.some(terms, len(terms))])


def _times(first: Polynomial, second: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (i,), a in first.items():
        for (j,), b in second.items():
            product[(i + j,)] = product.get((i + j,), 0) + a * b
    return product


def _derivative(polynomial: Polynomial, variable: int) -> Polynomial:
    derivative: Polynomial = {}
    for exponents, value in polynomial.items():
        power = exponents[variable]
        if power:
            lowered = list(exponents)
            lowered[variable] -= 1
            derivative[tuple(lowered)] = value * power
    return derivative


# -------------------------------------------------------------------------------------------------------------- modules
def _linear_1d(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """The root and all terms but one are drawn; the last constant makes the equation hold at the root."""
    letter = dice.pick(LETTERS)
    limit = int(level.size**0.5)
    root = dice.between(-limit, limit)
    count = dice.between(*level.parts)
    unknowns = dice.between(1, count - 1)
    terms = []
    slope = constant = 0
    for _ in range(unknowns):
        value = dice.signed(limit)
        slope += value
        terms.append((value, (1,)))
    for _ in range(count - unknowns - 1):
        value = dice.signed(level.size)
        constant += value
        terms.append((value, (0,)))
    last = -root * slope - constant
    if not slope or not last:
        return None
    terms.append((last, (0,)))
    left, right = [], []
    for value, exponents in dice.some(terms, count):
        if dice.below(2):
            right.append(term_text(-value, exponents, letter))
        else:
            left.append(term_text(value, exponents, letter))
    return f"Solve {joined(left)} = {joined(right)} for {letter}.", str(root)


def _sequence_next_term(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """Values of a polynomial in the index, from its first value and differences; the last difference is not 0."""
    degree = dice.between(*level.parts)
    count = degree + dice.between(2, 5)
    differences = []
    for order in range(degree + 1):
        limit = max(1, level.size // (2 * 5**order))
        differences.append(dice.between(-limit, limit) if order < degree else dice.signed(limit))
    terms = []
    for _ in range(count + 1):
        terms.append(str(differences[0]))
        for order in range(degree):  # each difference changes by the next higher one
            differences[order] += differences[order + 1]
    form = dice.pick(("What is next in {}?", "What comes next: {}?", "What is the next term in {}?"))
    return form.format(", ".join(terms[:-1])), terms[-1]


def _differentiate(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    letters = sorted(dice.some(LETTERS, dice.between(1, level.variables)))
    monomials = _monomials(level, dice, dice.between(*level.parts), len(letters))
    polynomial = {exponents: dice.signed(level.size) for exponents in monomials}
    variable = dice.below(len(letters))
    order = dice.between(1, level.order)
    derivative = polynomial
    for _ in range(order):
        derivative = _derivative(derivative, variable)
    if not derivative:
        return None
    forms = ["Find the {0} derivative of {1}{2}.", "What is the {0} derivative of {1}{2}?"]
    if order == 1:
        forms += ["Differentiate {1}{2}.", "Differentiate {1}{3}.", "What is the derivative of {1}{2}?"]
    short = long = ""
    if len(letters) > 1 or dice.below(2):
        short, long = f" wrt {letters[variable]}", f" with respect to {letters[variable]}"
    text = dice.pick(forms).format(NTH[order - 1], polynomial_text(polynomial, letters), short, long)
    return text, polynomial_text(derivative, letters)


def _add(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """Two polynomials p, q and a p + b q, with a and b coprime.  The sum is drawn; a p = sum mod b then gives p."""
    first, second, first_letter, second_letter, letter = dice.some(LETTERS, 5)
    a = dice.signed(min(12, level.size))
    b = dice.signed(min(12, level.size))
    if math.gcd(a, b) > 1:
        return None
    p: Polynomial = {}
    q: Polynomial = {}
    total: Polynomial = {}
    for exponents in _monomials(level, dice, dice.between(*level.parts)):
        total[exponents] = 0
        if dice.below(4):
            total[exponents] = dice.signed(max(9, level.size // 20))
        # p = total / a modulo b, so that b divides total - a p; then any multiple of |b| may be added.
        remainder = total[exponents] * pow(a, -1, abs(b)) % abs(b)
        limit = level.size // (1 + abs(a) // abs(b)) // abs(b)  # keeps the coefficients of q within `size`
        p[exponents] = remainder + abs(b) * dice.between(-limit - 1, limit)
        q[exponents] = (total[exponents] - a * p[exponents]) // b
        if not p[exponents]:
            return None
    if not any(total.values()):
        return None
    p_text = _loose(p, first_letter, dice.between(0, level.loose), level.size, dice)
    q_text = _loose(q, second_letter, dice.between(0, level.loose), level.size, dice)
    definitions = f"Let {first}({first_letter}) = {p_text}. Let {second}({second_letter}) = {q_text}."
    terms = [term_text(a, (1,), (f"{first}({letter})",)), term_text(b, (1,), (f"{second}({letter})",))]
    form = dice.pick(("What is {}?", "Calculate {}.", "Give {}.", "Determine {}."))
    return f"{definitions} {form.format(joined(terms))}", polynomial_text(total, (letter,))


def _expand(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """A product of factors of two terms; if `loose` allows it, some factors have one term."""
    letter = dice.pick(LETTERS)
    factors = []
    product: Polynomial = {(0,): 1}
    left = dice.between(0, level.loose)
    for _ in range(dice.between(*level.parts)):
        count = 2
        if level.loose and dice.below(2):
            count = 1
        factor = {exponents: dice.signed(level.size) for exponents in _monomials(level, dice, count)}
        pieces = left
        if count == 2 or left > 1:
            pieces = dice.between(0, left)
        left -= pieces
        factors.append(f"({_loose(factor, letter, pieces, level.size, dice)})")
        product = _times(product, factor)
    return f"Expand {'*'.join(factors)}.", polynomial_text(product, (letter,))


MAKERS: dict[str, Callable[[Level, StableRandom], tuple[str, str] | None]] = {
    "algebra__linear_1d": _linear_1d,
    "algebra__sequence_next_term": _sequence_next_term,
    "calculus__differentiate": _differentiate,
    "polynomials__add": _add,
    "polynomials__expand": _expand,
}
MODULES = tuple(MAKERS)
