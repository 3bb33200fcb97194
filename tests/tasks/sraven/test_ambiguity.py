"""Symbolic Raven: ambiguity by both definitions and the Bayes-optimal accuracy, against plain enumeration."""

import functools
import itertools
from collections import Counter

import pytest
from sraven_rules import obeys

from polyhead.tasks import Sraven
from polyhead.tasks.sraven.ambiguity import ambiguity, ambiguous, bayes


def panels_of(task, count, split="train"):
    return task.batch(split, count, seed=0, step=0).latents["panels"]


def orders(task):
    """All permutations of all columns; the first column's, too."""
    features = range(task.features)
    permutations = list(itertools.permutations(features)) if task.permuted else [tuple(features)]
    return list(itertools.product(permutations, repeat=task.grid))


def grid_of(panel, slots):
    return tuple(tuple(row[c][slot] for c, slot in enumerate(slots)) for row in panel)


# ------------------------------------------------------------------------------------------ both definitions, by hand
def fitting(grid, values):
    """The answers of the rules that fit a feature's symbols, the last of which is not looked at, in the original code's
    terms: one cell after another."""
    complete, incomplete = grid[:-1], grid[-1][:-1]
    answers = []
    for step in (0, 1, 2, -1, -2):
        rows = [*complete, incomplete]
        if all((row[i + 1] - row[i] - step) % values == 0 for row in rows for i in range(len(row) - 1)):
            answers.append((incomplete[-1] + step) % values)
    if all(row[-1] == sum(row[:-1]) % values for row in complete):
        answers.append(sum(incomplete) % values)
    if all(row[-1] == (row[0] - sum(row[1:-1])) % values for row in complete):
        answers.append((incomplete[0] - sum(incomplete[1:])) % values)
    symbols = sorted(complete[0])
    if all(sorted(row) == symbols for row in complete) and set(incomplete) <= set(symbols):
        counts = [incomplete.count(symbol) for symbol in symbols]
        answers.append(symbols[counts.index(min(counts))])
    return answers


def ambiguous_by_hand(panel, task, definition):
    @functools.cache
    def fits_and_misleads(slots):
        grid = grid_of(panel, slots)
        answers = fitting(grid, task.values)
        return bool(answers), any(answer != grid[-1][-1] for answer in answers)

    for order in orders(task):
        fits, misleads = zip(*(fits_and_misleads(slots) for slots in zip(*order, strict=True)), strict=True)
        if all(fits) and (all(misleads) if definition == "code" else any(misleads)):
            return True
    return False


SETTINGS = [
    {"features": 3, "values": 4},
    {"features": 2, "values": 4, "grid": 4},
    {"features": 3, "values": 4, "grid": 2},
    {"features": 3, "values": 3, "permuted": False},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("definition", ["code", "text"])
def test_ambiguity_is_what_listing_all_permutations_finds(setting, definition):
    task = Sraven(**setting)
    panels = panels_of(task, 60)
    actual = ambiguous(panels, task, definition)
    expected = [ambiguous_by_hand(panel, task, definition) for panel in panels.tolist()]
    assert actual.tolist() == expected
    if definition == "text" and task.grid > 2:  # with 2, one row shown whole leaves nearly everything open
        assert 0 < sum(expected) < 60


# ------------------------------------------------------------------------------------------ Bayes, by hand
@functools.cache
def grids(values, size):
    """For each rule all grids that obey it, as (symbols shown, answer), by trying all."""
    by_rule = {rule: [] for rule in range(8)}
    rows = list(itertools.product(range(values), repeat=size))
    for rule in range(8):
        fitting_rows = [row for row in rows if rule == 7 or obeys([row], rule, values=values)]
        for grid in itertools.product(fitting_rows, repeat=size):
            if obeys(grid, rule, values=values):
                by_rule[rule].append((tuple(itertools.chain(*grid))[:-1], grid[-1][-1]))
    return {rule: (Counter(pairs), len(pairs)) for rule, pairs in by_rule.items()}


def posterior_by_hand(panel, task, multisets):
    """Probability of every answer, up to a factor: the generator's choices one after another."""
    table = grids(task.values, task.grid)
    mass = Counter()
    for order in orders(task):
        for rules in multisets:
            options = [(1.0, ())]
            for feature, rule in enumerate(rules):
                slots = [column.index(feature) for column in order]
                symbols = tuple(itertools.chain(*grid_of(panel, slots)))[:-1]
                counts, total = table[rule]
                options = [
                    (p * counts[symbols, answer] / total, (*answers, (slots[-1], answer)))
                    for p, answers in options
                    for answer in range(task.values)
                    if counts[symbols, answer]
                ]
            for p, answers in options:
                mass[tuple(answer for _, answer in sorted(answers))] += p
    return mass


def accuracy_by_hand(mass, truth):
    best = [answer for answer, p in mass.items() if p > max(mass.values()) * (1 - 1e-9)]
    return (truth in best) / len(best) if best else 0


@pytest.mark.parametrize(
    ("setting", "count", "known"),
    [
        ({"features": 2, "values": 3}, 40, False),
        ({"features": 2, "values": 3}, 40, True),
        ({"features": 3, "values": 3}, 3, True),
        ({"features": 2, "values": 4, "grid": 2}, 40, True),
        ({"features": 3, "values": 3, "permuted": False}, 30, False),
    ],
    ids=str,
)
def test_bayes_is_what_enumerating_the_generator_gives(setting, count, known):
    task = Sraven(**setting)
    multisets = list(itertools.combinations_with_replacement(range(8), task.features))
    rules = task.rules("train") if known else None
    panels = panels_of(task, count, "compositional")
    accuracy, answers = bayes(panels, task, rules=rules)
    uncertain = 0
    for b, panel in enumerate(panels.tolist()):
        mass = posterior_by_hand(panel, task, rules.tolist() if known else multisets)
        assert answers[b] == len(mass)
        expected = accuracy_by_hand(mass, tuple(panel[-1][-1]))
        assert accuracy[b].item() == pytest.approx(expected)
        uncertain += expected < 1
    assert uncertain


# ------------------------------------------------------------------------------------------ Table A2
@pytest.mark.parametrize(
    ("values", "code", "text", "ceiling"),
    [(4, (0.0522, 0.0762), 0.70, 0.77), (8, (0.0005, 0.006), 0.26, 0.92), (16, (0.0, 0.0015), 0.09, 0.98)],
)
def test_ambiguity_and_ceiling_are_those_of_table_a2(values, code, text, ceiling):
    scores = ambiguity(Sraven(values=values), 4096)
    assert set(scores) == {"code", "text", "bayes"}
    assert code[0] <= scores["code"].mean <= code[1]
    assert abs(scores["text"].mean - text) < 0.03
    assert abs(scores["bayes"].mean - ceiling) < 0.02
    assert {score.count for score in scores.values()} == {4096}


def test_what_cannot_be_counted_is_refused():
    task, panels = Sraven(), panels_of(Sraven(), 2)
    for call, message in (
        (lambda: ambiguity(task, 10, split="ood"), "Sraven: unknown split 'ood'"),
        (lambda: ambiguous(panels, task, "txt"), r"ambiguous: unknown definition 'txt'; did you mean 'text'\?"),
        (lambda: bayes(panels, Sraven(features=9, grid=8)), "Sraven: 9 features on a grid of 8 have 828592"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
