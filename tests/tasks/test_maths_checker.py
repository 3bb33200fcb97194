"""The checker of mathematics accepts right and rejects wrong answers, to our questions and published ones."""

import doctest

import maths_checker
import pytest
from maths_checker import CHECKS, fault, value

from polyhead.tasks.maths.modules import DIFFICULTIES, LEVELS, MODULES, Dice, Level, question

WRONG = [
    ("algebra__linear_1d", "Solve 2*x + 3 = 5 for x.", "2", "x = 2 does not solve it"),
    ("algebra__linear_1d", "Solve 2*x + 3 = 2*x + 3 for x.", "2", "any x solves it"),
    ("algebra__linear_1d", "Solve 2*x + 3 = 5 for x.", "01", "'01' is no integer"),
    ("algebra__linear_1d", "Solve 2*x + 3 = 5 for x", "1", "is no question of this module"),
    ("algebra__linear_1d", "Solve 2*x + y = 5 for x.", "1", "'2*x + y' is no polynomial"),
    ("algebra__sequence_next_term", "What is next in 1, 4, 9, 16?", "24", "24 does not follow; 25 does"),
    ("algebra__sequence_next_term", "What is next in 1, 4, 9?", "16", "no rule shows in the sequence"),
    ("algebra__sequence_next_term", "What comes next: 1, 1, 1?", "2", "2 does not follow; 1 does"),
    ("calculus__differentiate", "Differentiate 3*x**2 + 7.", "6*x + 7", "6*x + 7 is not the derivative"),
    ("calculus__differentiate", "What is the second derivative of x**3 wrt x?", "3*x**2", "is not the derivative"),
    ("calculus__differentiate", "Find the first derivative of a*x**2 wrt x.", "x**2", "x**2 is not the derivative"),
    ("calculus__differentiate", "Find the first derivative of a*x**2 wrt x.", "2*x*a*1", "not well written"),
    ("polynomials__add", "Let f(a) = 2*a. Let g(b) = 1 - b. What is 3*f(x) - g(x)?", "7*x + 1", "is not the sum"),
    ("polynomials__add", "Let f(a) = 2*a. Let g(b) = 1 - b. What is 3*h(x) - g(x)?", "7*x - 1", "is no polynomial"),
    ("polynomials__expand", "Expand (x + 2)*(x - 2).", "x**2 + 4", "x**2 + 4 is not the product"),
    ("polynomials__expand", "Expand (x + 2)*(x - 2).", "-4 + x**2", "the order of its terms"),
    ("polynomials__expand", "Expand (2 - 1)*(x - 2).", "1*x - 2", "'1*x'"),
    ("polynomials__expand", "Expand (2 - 1)*(x - 2).", "x**1 - 2", "'x**1'"),
    ("polynomials__expand", "Expand (x + 0)*(x - 2).", "x**2 - x - x", "the order of its terms"),
    ("polynomials__expand", "Expand (x + 0)*(x - 2).", "x**2 - 2*x + 0", "'0'"),
    ("polynomials__expand", "Expand (1 - x)*(4 - 2).", "-2*x + 2", "the order of its terms"),
    ("polynomials__expand", "Expand (x)*(x**99).", "x**100", "exponents must be 0 to 15 but one is 100"),
]


def test_the_worked_examples():
    found = doctest.testmod(maths_checker)
    assert (found.attempted, found.failed) == (2, 0)


@pytest.mark.parametrize(("module", "asked", "answer", "reason"), WRONG)
def test_a_wrong_answer_is_told(module, asked, answer, reason):
    found = fault(module, asked, answer)
    assert found is not None
    assert reason in found


def published(fixtures):
    lines = (fixtures / "maths_published.txt").read_text().splitlines()
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


def test_published_questions_are_read_and_their_answers_right(fixtures):
    rows = published(fixtures)
    assert {row[0] for row in rows} == set(CHECKS) == set(MODULES)
    assert len(rows) == 60
    for module, asked, answer in rows:
        assert fault(module, asked, answer) is None
        other = str(int(answer) + 1) if answer.lstrip("-").isdigit() else answer.replace("*", "*1", 1)
        if other != answer:
            assert fault(module, asked, other) is not None


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_generated_answer_is_right(module, difficulty):
    level = LEVELS[module][difficulty]
    for kind in (level, level.longer(), level.larger()):
        dice, found = Dice(3), 0
        while found < 25:
            pair = question(module, kind, dice)
            if pair is not None:
                found += 1
                assert fault(module, *pair) is None


def test_no_equation_is_solved_by_anything():
    """Coefficients that cancel are rare, and small ones cancel most often."""
    dice, level, found = Dice(0), Level((4, 4), 9), 0
    while found < 200:
        pair = question("algebra__linear_1d", level, dice)
        if pair is not None:
            found += 1
            assert fault("algebra__linear_1d", *pair) is None


def test_an_expression_is_no_program():
    for text in (
        "__import__('os')",
        "x.real",
        "f(x, x)",
        "[x]",
        "x if x else x",
        "1.5*x",
        "x <= 1",
        "x +",
        "True and x",
    ):
        with pytest.raises(ValueError, match=r"is no polynomial"):
            value(text, {"x": 1, "f": abs})
