"""Draws a figure of a study with planted scores (tests/papers/conftest.py), quickly, and returns its texts."""

import dataclasses

import pytest

from polyhead.analysis import figures
from polyhead.papers import outcome
from polyhead.papers.dual.models import DUAL
from polyhead.papers.reproduce import FIGURES


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pictures, which take most of the time, and few sequences for baselines."""
    monkeypatch.setattr(outcome, "BASELINE_SEQUENCES", 60)
    monkeypatch.setattr(figures, "lines", lambda panels, **_: None)


def draw(study):
    figure = FIGURES[study.figure].draw(study)
    assert all(picture.caption for picture in figure.pictures)
    assert all(len(row) == len(figure.head) for row in figure.rows)
    return figure


def without(study, is_lost):
    """The study as if the runs for which `is_lost` is true had failed."""
    return dataclasses.replace(study, points=tuple(point for point in study.points if not is_lost(point.run)))


def scores(ahead):
    """Models ahead of the others (or behind) by so much, a little more on each further seed."""
    return lambda run, sign=1.0: 0.5 + sign * ahead.get(DUAL.row_of(run), 0.0) * (1 + 0.01 * run.seed)


def facts_of(verdict):
    """Claim, verdict and the numbers of its tests, which are the same in results of every version."""
    numbers = [(part["name"], part["mean"], part["standard_error"], part["p"]) for part in verdict["parts"]]
    return verdict["claim"], verdict["outcome"], numbers
