"""Questions of five modules of school mathematics, in the text format of Saxton et al. 2019, by our own generators.

    algebra__linear_1d           Solve 15*j - 64 = 38*j + 5 for j.                          -3
    algebra__sequence_next_term  What is next in 480, 987, 1494?                            2001
    calculus__differentiate      Find the second derivative of 72*a**5 + a**3 - 23*a.       1440*a**3 + 6*a
    polynomials__add             Let i(q) = 7 - 14*q. Let l(c) = 2 - 5*c. Determine -3*i(b) + 8*l(b).     2*b - 5
    polynomials__expand          Expand (2*x - 1)*(x + 4*x + 3).                            10*x**2 + x - 3

A question has a number of `parts` and a largest number.  An extrapolation split has more parts, or larger numbers.
The tests check every answer with independent code.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")
Polynomial = dict[tuple[int, ...], int]
"""Maps exponents to coefficients: 3*a**2*x - 1 over the letters (a, x) is {(2, 1): 3, (0, 0): -1}."""

LETTERS = "abcdfghijklmnopqrstuvwxyz"  # without e, which is a constant
NTH = ("first", "second", "third")
TRIES = 10_000


@dataclass(frozen=True)
class Level:
    """The difficulty of questions.

    parts: the range (least, most) of the module's count: terms of an equation (linear_1d), degree of a sequence
        (sequence_next_term), terms after collecting (differentiate: of the expression; add: of the first
        polynomial), factors (expand).
    size: an upper bound on the numbers in a question.  least: the largest number of a question must exceed it.
    degree: largest exponent.  variables: most letters.  order: highest derivative.  loose: most terms that are written
        as the sum of two terms.
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
    "algebra__linear_1d": {
        "easy": Level((2, 3), 100),
        "medium": Level((2, 4), 2_500),
        "hard": Level((3, 5), 90_000),
    },
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

    def signed(self, most: int) -> int:
        """A number of magnitude 1 to `most`, of either sign."""
        value = int(self.roll() * 2 * most) - most
        return value if value < 0 else value + 1

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.roll() * len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` of `items`, in random order."""
        left = list(items)
        return [left.pop(int(self.roll() * len(left))) for _ in range(count)]


def question(module: str, level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """A question of `level` and its answer; None if the draw failed and must be repeated."""
    found = MAKERS[module](level, dice)
    if found is None or not level.least < max(map(int, _NUMBER.findall(found[0])), default=0) <= level.size:
        return None
    return found


_NUMBER = re.compile(r"\d+")


# ----------------------------------------------------------------------------------------------------------------- text
def polynomial_text(polynomial: Polynomial, letters: Sequence[str]) -> str:
    """Terms in descending lexical order of their exponents; but `2 - 3*x` to avoid a leading minus.

    >>> polynomial_text({(2, 1): 3, (0, 2): -1, (0, 0): 5}, ("a", "x"))
    '3*a**2*x - x**2 + 5'
    """
    terms = sorted(((key, value) for key, value in polynomial.items() if value), reverse=True)
    if len(terms) == 2 and terms[0][1] < 0 < terms[1][1] and not any(terms[1][0]) and _letters_in(terms[0][0]) == 1:
        terms.reverse()
    return joined([term_text(value, key, letters) for key, value in terms])


def _letters_in(exponents: tuple[int, ...]) -> int:
    return sum(exponent > 0 for exponent in exponents)


def term_text(value: int, exponents: tuple[int, ...], letters: Sequence[str]) -> str:
    """`-3*a**2*x`; a factor of 1 is not written."""
    powers = [
        letter if exponent == 1 else f"{letter}**{exponent}"
        for letter, exponent in zip(letters, exponents, strict=True)
        if exponent
    ]
    if not powers:
        return str(value)
    if value in (1, -1):
        return ("" if value == 1 else "-") + "*".join(powers)
    return f"{value}*" + "*".join(powers)


def joined(terms: Sequence[str]) -> str:
    """The sum of terms: `x - 2`, not `x + -2`; an empty sum is 0."""
    return " + ".join(terms).replace("+ -", "- ") or "0"


# ---------------------------------------------------------------------------------------------------------- polynomials
def _monomials(level: Level, dice: StableRandom, count: int, variables: int = 1) -> list[tuple[int, ...]]:
    """`count` distinct tuples of exponents, or all if there are fewer."""
    if variables == 1:
        return [(exponent,) for exponent in dice.some(range(level.degree + 1), min(count, level.degree + 1))]
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(dice.below(level.degree + 1) for _ in range(variables))] = None
    return list(found)


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


# -------------------------------------------------------------------------------------------------------------- modules
def _linear_1d(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """The root and all terms but one are drawn; the last constant makes the equation hold at the root."""
    letter, most = dice.pick(LETTERS), int(level.size**0.5)
    root, count = dice.between(-most, most), dice.between(*level.parts)
    unknowns = dice.between(1, count - 1)
    slopes = [dice.signed(most) for _ in range(unknowns)]
    constants = [dice.signed(level.size) for _ in range(count - unknowns - 1)]
    last = -root * sum(slopes) - sum(constants)
    if not sum(slopes) or not last:
        return None
    sides: tuple[list[str], list[str]] = ([], [])
    terms = [(slope, (1,)) for slope in slopes] + [(constant, (0,)) for constant in (*constants, last)]
    for value, exponents in dice.some(terms, count):
        side = dice.below(2)
        sides[side].append(term_text(-value if side else value, exponents, letter))
    return f"Solve {joined(sides[0])} = {joined(sides[1])} for {letter}.", str(root)


def _sequence_next_term(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """Values of a polynomial in the index, from its first value and differences; the last difference is not 0."""
    degree = dice.between(*level.parts)
    shown = degree + dice.between(2, 5)
    differences = [max(1, level.size // (2 * 5**order)) for order in range(degree + 1)]
    front = [dice.between(-most, most) for most in differences[:-1]] + [dice.signed(differences[-1])]
    terms = []
    for _ in range(shown + 1):
        terms.append(front[0])
        front = [value + change for value, change in zip(front, [*front[1:], 0], strict=True)]
    asked = dice.pick(("What is next in {}?", "What comes next: {}?", "What is the next term in {}?"))
    return asked.format(", ".join(map(str, terms[:-1]))), str(terms[-1])


def _differentiate(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    letters = sorted(dice.some(LETTERS, dice.between(1, level.variables)))
    keys = _monomials(level, dice, dice.between(*level.parts), len(letters))
    polynomial = {exponents: dice.signed(level.size) for exponents in keys}
    place, order = dice.below(len(letters)), dice.between(1, level.order)
    derivative = polynomial
    for _ in range(order):
        derivative = {
            (*key[:place], key[place] - 1, *key[place + 1 :]): value * key[place]
            for key, value in derivative.items()
            if key[place]
        }
    if not derivative:
        return None
    forms = ["Find the {0} derivative of {1}{2}.", "What is the {0} derivative of {1}{2}?"]
    if order == 1:
        forms += ["Differentiate {1}{2}.", "Differentiate {1}{3}.", "What is the derivative of {1}{2}?"]
    named = len(letters) > 1 or dice.below(2)
    wrt = (f" wrt {letters[place]}", f" with respect to {letters[place]}") if named else ("", "")
    asked = dice.pick(forms).format(NTH[order - 1], polynomial_text(polynomial, letters), *wrt)
    return asked, polynomial_text(derivative, letters)


def _add(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """Two polynomials p, q and a p + b q, with a and b coprime.  The sum is drawn; a p = sum mod b then gives p."""
    first, second, *letters, asked = dice.some(LETTERS, 5)
    a, b = dice.signed(min(12, level.size)), dice.signed(min(12, level.size))
    if math.gcd(a, b) > 1:
        return None
    p: Polynomial = {}
    q: Polynomial = {}
    total: Polynomial = {}
    for exponents in _monomials(level, dice, dice.between(*level.parts)):
        total[exponents] = dice.signed(max(9, level.size // 20)) if dice.below(4) else 0
        rest = total[exponents] * pow(a, -1, abs(b)) % abs(b)
        most = level.size // (1 + abs(a) // abs(b)) // abs(b)  # keeps the coefficients of q within `size`
        p[exponents] = rest + abs(b) * dice.between(-most - 1, most)
        q[exponents] = (total[exponents] - a * p[exponents]) // b
        if not p[exponents]:
            return None
    if not any(total.values()):
        return None
    told = [
        f"Let {name}({letter}) = {_loose(polynomial, letter, dice.between(0, level.loose), level.size, dice)}."
        for name, letter, polynomial in ((first, letters[0], p), (second, letters[1], q))
    ]
    wanted = joined([term_text(a, (1,), (f"{first}({asked})",)), term_text(b, (1,), (f"{second}({asked})",))])
    form = dice.pick(("What is {}?", "Calculate {}.", "Give {}.", "Determine {}."))
    return f"{' '.join(told)} {form.format(wanted)}", polynomial_text(total, (asked,))


def _expand(level: Level, dice: StableRandom) -> tuple[str, str] | None:
    """A product of factors of two terms; if `loose` allows it, some factors have one term."""
    letter, factors = dice.pick(LETTERS), []
    product: Polynomial = {(0,): 1}
    left = dice.between(0, level.loose)
    for _ in range(dice.between(*level.parts)):
        count = 1 if level.loose and dice.below(2) else 2
        factor = {exponents: dice.signed(level.size) for exponents in _monomials(level, dice, count)}
        pieces = left if count == 1 and left < 2 else dice.between(0, left)
        left -= pieces
        text = _loose(factor, letter, pieces, level.size, dice)
        factors.append(f"({text})")
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
