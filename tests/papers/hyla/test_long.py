"""The long trainings: quantities of their courses, and their pages, drawn again from the committed runs."""

import argparse
import json
import types
from dataclasses import replace

import pandas
import pytest
from drawn import facts_of
from scripts import ROOT, loaded

from polyhead.analysis import figures
from polyhead.papers import page
from polyhead.papers.hyla import long
from polyhead.papers.recipes import RECIPES
from polyhead.papers.study import FinishedRun
from polyhead.tasks import FuzzyLogic, Sraven

RESULTS = ROOT / "docs" / "results"
PAGES = ("long", "parts", "settings", "width", "length", "sraven")
STEPS = (2500, 5000, 7500)
KNOWN, UNSEEN = (0.70, 0.86, 0.94), (0.50, 0.60, 0.80)


@pytest.mark.parametrize(
    ("skill", "expected"),
    # .80 is 10 of 16 hundredths on the way from the first to the second; .90 half-way from the second to the third
    [(0.80, 0.50 + 0.10 * 10 / 16), (0.90, 0.70), (0.86, 0.60), (0.94, 0.80), (0.95, None), (0.70, None), (0.6, None)],
)
def test_equal_skill_lies_between_the_first_score_that_reaches_it_and_the_one_before(skill, expected):
    known, unseen = dict(zip(STEPS, KNOWN, strict=True)), dict(zip(STEPS, UNSEEN, strict=True))
    later = {10_000: 0.1}  # falls behind again, and does not count
    actual = long.at_skill(known | later, unseen | later, skill)
    assert actual == (None if expected is None else pytest.approx(expected))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By page: results.json as committed, the same drawn again, content and options of its pictures.

    Baselines, which take minutes, are the committed ones.
    """
    folder = tmp_path_factory.mktemp("pages")
    by_page = {}
    trainings = loaded("benchmarks", "long_trainings.py")
    with pytest.MonkeyPatch.context() as patch:
        for name in PAGES:
            subfolder = "sraven" if name == "sraven" else f"fuzzy/{name}"
            pictures = []
            committed = json.loads((RESULTS / subfolder / "results.json").read_text())

            def baselines_of(point, committed=committed):
                labels = long.RAVEN_BASELINES if isinstance(point.run.task, Sraven) else long.BASELINES
                numbers, seed = committed["numbers"], str(point.run.seed)
                return {baseline: numbers[label]["unseen"][seed] for baseline, label in labels.items()}

            def record(content, pictures=pictures, **options):
                pictures.append((content, options))

            patch.setattr(long, "baselines_of", baselines_of)
            for kind in ("lines", "results"):
                patch.setattr(figures, kind, record)
            patch.setattr(figures, "save", lambda figure, path: None)
            patch.setattr(page, "figure_as_svg", lambda figure, caption, name: caption)
            trainings.draw(argparse.Namespace(folders=[], into=folder, pages=[name]))
            redrawn = json.loads((folder / subfolder / "results.json").read_text())
            by_page[name] = types.SimpleNamespace(committed=committed, redrawn=redrawn, pictures=pictures)
    return by_page


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_follow_from_the_committed_runs(name, pages):
    """Scores, tests with their corrected p-values, and the table.  A run with another digest would be left out."""
    committed, redrawn = pages[name].committed, pages[name].redrawn
    assert list(map(facts_of, redrawn["verdicts"])) == list(map(facts_of, committed["verdicts"]))
    for field in ("rows", "numbers", "notes", "pictures"):
        assert redrawn[field] == committed[field], field
    assert [run["digest"] for run in redrawn["runs"]] == [run["digest"] for run in committed["runs"]]


def test_pictures_have_courses_equal_skill_baselines_and_the_papers_scores(pages):
    """Seed 6 stands beside the tests and seed 0 chose the rates: they are in the tables alone."""
    numbers = pages["long"].committed["numbers"]
    (courses, _), (scores, options) = pages["long"].pictures
    (_, course, levels), (_, skill, levels_of_skill) = courses
    assert list(course) == ["HYLA", "Softmax", "Linear"]
    assert {len(values) for values in course["HYLA"].values()} == {5}
    assert list(map(len, skill["HYLA"].values())) == [5, 5, 5, 4]  # one run never came to 0.94
    assert levels == levels_of_skill == options["baselines"]
    assert list(levels) == list(long.BASELINES.values())
    assert scores["HYLA"] == [numbers["HYLA"]["unseen"][str(seed)] for seed in long.SEEDS]
    assert options["printed"]["HYLA"] == pytest.approx((0.811, 0.078, 3), abs=5e-4)
    courses, _ = pages["sraven"].pictures[0]
    (_, course, levels), _ = courses
    assert {len(values) for values in course["HYLA"].values()} == {3}  # of seeds 0 to 3
    assert set(levels) == set(long.RAVEN_BASELINES.values())


def test_that_softmax_gains_nothing_is_a_claim_of_no_difference(pages):
    verdicts = {verdict["claim"]: verdict["outcome"] for verdict in pages["long"].committed["verdicts"]}
    assert verdicts["6. softmax gains nothing on unseen combinations after step 5,000"] == "no"
    scores = pandas.DataFrame({("late", "softmax"): {seed: 0.001 * seed for seed in long.SEEDS}})
    (verdict,) = long.verdicts(scores, long.TESTS)
    assert verdict.outcome == "yes"


def test_the_page_on_width_has_a_line_per_kind_and_a_point_per_width_that_was_trained(pages):
    (((_, curves, _),), _) = pages["width"].pictures[0]
    numbers = pages["width"].committed["numbers"]
    assert list(curves) == ["HYLA", "Softmax", "Linear"]
    for label, by_width in curves.items():
        for width, values in by_width.items():
            name = label if width == 2 else f"{label}, width {width}"
            assert values == [
                numbers[name]["unseen"][str(seed)] for seed in long.SEEDS if str(seed) in numbers[name]["unseen"]
            ]
        assert len(by_width[2]) == 5


def test_models_without_a_common_seed_of_the_protocol_are_not_compared():
    scores = {("unseen", "hyla"): {0: 0.9, 1: 0.9, 6: 0.9}, ("unseen", "linear"): {0: 0.1, 2: 0.1, 6: 0.1}}
    assert long.verdicts(pandas.DataFrame(scores), long.TESTS) == ()


@pytest.mark.parametrize(
    ("task", "weak"), [(FuzzyLogic(variables=3, terms=2, length=8), "recall"), (Sraven(2, 5), "same_slot")]
)
def test_baselines_are_of_the_sequences_on_which_a_run_was_scored(task, weak, monkeypatch):
    batches = []
    draw_batch = type(task).batch

    def recorded(task, split, size, *, seed, step, **options):
        batches.append((split, size, seed, step))
        return draw_batch(task, split, size, seed=seed, step=step, **options)

    monkeypatch.setattr(type(task), "batch", recorded)
    run = RECIPES["fuzzy-hyla"]()
    run = replace(run, task=task, seed=1, train=replace(run.train, batch_size=8, eval_batches=2))
    baselines = long.baselines_of(FinishedRun(run, None))
    assert baselines[weak] < baselines["ceiling"]
    if isinstance(task, FuzzyLogic):
        assert [batch for batch in batches if batch[0] == "compositional"] == [
            ("compositional", 8, 1, step) for step in (0, 1)
        ]
