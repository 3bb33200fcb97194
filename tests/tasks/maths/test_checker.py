"""The checker of mathematics accepts right and rejects wrong answers, to our questions and published ones."""

import zlib

import pytest
from maths_checker import CHECKS, fault

from polyhead.tasks.maths.modules import DIFFICULTIES, LEVELS, MODULES, StableRandom, question


def test_published_questions_are_read_and_their_answers_right(fixtures):
    lines = (fixtures / "maths_published.txt").read_text().splitlines()
    rows = list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))
    assert {row[0] for row in rows} == set(CHECKS) == set(MODULES)
    assert len(rows) == 60
    for module, text, answer in rows:
        assert fault(module, text, answer) is None
        wrong_answer = str(int(answer) + 1) if answer.lstrip("-").isdigit() else answer.replace("*", "*1", 1)
        if wrong_answer != answer:
            assert fault(module, text, wrong_answer) is not None


def questions(module, level, seed, count):
    rng, pairs = StableRandom(seed), []
    while len(pairs) < count:
        pair = question(module, level, rng)
        if pair is not None:
            pairs.append(pair)
    return pairs


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_generated_answer_is_right(module, difficulty):
    level = LEVELS[module][difficulty]
    for kind in (level, level.longer(), level.larger()):
        assert not any(fault(module, *pair) for pair in questions(module, kind, 3, 25))


DRAWN = {
    "algebra__linear_1d": 948598650,
    "algebra__sequence_next_term": 2805755992,
    "calculus__differentiate": 625966065,
    "polynomials__add": 2521047206,
    "polynomials__expand": 2144555477,
}


@pytest.mark.parametrize(("module", "checksum"), DRAWN.items())
def test_what_is_drawn_stays_the_same(module, checksum):
    """Runs are compared across versions of this package; a new number here is a new task."""
    by_difficulty = [questions(module, LEVELS[module][difficulty], 5, 100) for difficulty in DIFFICULTIES]
    assert zlib.crc32(repr(by_difficulty).encode()) == checksum
