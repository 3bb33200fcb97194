"""The long trainings: quantities of their courses, and the tests of the protocol."""

import itertools
import json
import pathlib
from dataclasses import replace

import pandas
import pytest
from planted import finished
from scripts import loaded

from polyhead.analysis import figures
from polyhead.analysis.claims import UNDECIDED, YES
from polyhead.config import Train, digest
from polyhead.papers.hyla import long
from polyhead.papers.recipes import RECIPES
from polyhead.papers.study import FinishedRun, Study
from polyhead.tasks import FuzzyLogic, Sraven

RESULTS = pathlib.Path(__file__).parents[3] / "docs" / "results" / "fuzzy"
OLD_WORDS = {"holds": "yes", "does not hold": "no", "not enough evidence": "undecided", "not a test": "undecided"}
"""Verdict in older results -> today's."""
STEPS = (2500, 5000, 7500)
KNOWN, UNSEEN = (0.70, 0.86, 0.94), (0.50, 0.60, 0.80)


@pytest.mark.parametrize(
    ("skill", "wanted"),
    # .80 is 10 of 16 hundredths on the way from the first to the second; .90 half-way from the second to the third
    [(0.80, 0.50 + 0.10 * 10 / 16), (0.90, 0.70), (0.86, 0.60), (0.94, 0.80), (0.95, None), (0.70, None), (0.6, None)],
)
def test_equal_skill_lies_between_the_first_score_that_reaches_it_and_the_one_before(skill, wanted):
    known, unseen = dict(zip(STEPS, KNOWN, strict=True)), dict(zip(STEPS, UNSEEN, strict=True))
    later = {10_000: 0.1}  # falls behind again, and does not count
    found = long.at_skill(known | later, unseen | later, skill)
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_committed_verdicts_follow_from_the_committed_numbers():
    """Of real trainings of five seeds: each difference, its p-value corrected within its family, and the outcome."""
    about = json.loads((RESULTS / "long" / "results.json").read_text())
    names = {label: name for name, label in long.NAMES.items()}
    found = {
        (quantity, names[label]): {int(seed): value for seed, value in values.items()}
        for label, by in about["numbers"].items()
        for quantity, values in by.items()
    }
    came, wanted = (
        [verdict.to_dict() for verdict in long.verdicts(pandas.DataFrame(found), long.TESTS)],
        about["verdicts"],
    )
    assert [verdict["claim"] for verdict in came] == [verdict["claim"] for verdict in wanted]
    words = [OLD_WORDS.get(verdict["outcome"], verdict["outcome"]) for verdict in wanted]
    assert [verdict["outcome"] for verdict in came] == words
    assert {YES, UNDECIDED} <= set(words)
    p_values = [[part["corrected_p"] for one in verdicts for part in one["parts"]] for verdicts in (came, wanted)]
    assert p_values[0] == pytest.approx(p_values[1], rel=1e-6)


def test_runs_have_the_configurations_of_the_protocol():
    """The digests of runs that are trained: with another one a run would begin anew, under its old name."""
    trainings = loaded("benchmarks", "long_trainings.py")
    wanted = {
        "linear": "d1e539c77fd0",
        "hyla": "bd292b1083ed",
        "hyla-linear": "75e2054b0160",
        "linear-rms": "dad7330d1526",
    }
    wanted |= {"length-16-hyla": "7eb1205a88dc", "hyla-width-8": "9086301201f4"}
    wanted |= {"softmax-dropout": "6fe2958bac9c", "softmax-decay": "b9174354a47e"}
    assert {row: digest(trainings.training(row, 1)) for row in wanted} == wanted
    assert {trainings.CHANGED[row] for row in ("length-16-linear", "linear-width-8", "linear-rms")} == {"linear"}
    assert {row for row in trainings.SETTINGS if not row.startswith("length-16-")} == set(long.SETTINGS)


def test_differences_are_of_the_seeds_that_both_have():
    found = {("unseen", "hyla"): dict.fromkeys(long.SEEDS, 0.9), ("unseen", "softmax"): {1: 0.5, 3: 0.6, 6: 0.1}}
    (verdict,) = long.verdicts(pandas.DataFrame(found), long.TESTS)
    assert verdict.parts[0].estimate.values == pytest.approx({1: 0.9 - 0.5, 3: 0.9 - 0.6})
    assert verdict.outcome == UNDECIDED
    others = {("unseen", "hyla"): {0: 0.9, 6: 0.9}, ("unseen", "linear"): {0: 0.1, 6: 0.1}}
    assert long.verdicts(pandas.DataFrame(others), long.TESTS) == ()


def at(point, name, seed=1, **changes):
    """The run of `point` under another name and seed."""
    return replace(point, run=replace(point.run, name=name, seed=seed), **changes)


@pytest.fixture
def study(tmp_path):
    """One run of HYLA and one of softmax, of the courses above; softmax has 0.05 less on unseen combinations."""
    points = []
    for row, less in (("hyla", 0.0), ("softmax", 0.05)):
        task = FuzzyLogic(variables=3, terms=2, length=8, split_seed=1)
        train = Train(batch_size=8, eval_batches=2)
        run = replace(RECIPES[f"fuzzy-{row}"](), task=task, name=f"{row}-1", seed=1, train=train)
        ends = {"iid": KNOWN, "compositional": [score - less for score in UNSEEN], "novel": (0, 0, 0)}
        courses = {}
        for split, course in ends.items():
            courses[split] = {step: {"r2": score} for step, score in zip(STEPS, course, strict=True)}
        scores = {split: {"r2": course[-1], "r2_se": 0.01} for split, course in ends.items()}
        points.append(FinishedRun(run, finished(run, tmp_path, scores, courses)))
    return Study("long", long.LONG, "paper", tmp_path, tuple(points))


@pytest.fixture
def drawn(monkeypatch):
    """What was asked to be drawn: (content, options) of every picture."""
    pictures = []
    for kind in ("lines", "results"):
        monkeypatch.setattr(figures, kind, lambda content, **options: pictures.append((content, options)))
    return pictures


def test_the_figure_has_the_courses_equal_skill_and_the_baselines_of_the_same_sequences(study, drawn, monkeypatch):
    """The second picture has the scores at the end beside those of the paper."""
    batches = []
    plain = FuzzyLogic.batch

    def watched(task, split, size, *, seed, step, **options):
        batches.append((split, size, seed, step))
        return plain(task, split, size, seed=seed, step=step, **options)

    monkeypatch.setattr(FuzzyLogic, "batch", watched)
    found = long.draw(study)
    (_, course, levels), (_, skill, same) = drawn[0][0]
    assert course["HYLA"] == {2.5: [0.5], 5.0: [0.6], 7.5: [0.8]}
    assert {at: scores for at, (scores,) in skill["Softmax"].items()} == pytest.approx(
        {0.80: 0.5125, 0.85: 0.54375, 0.90: 0.65, 0.94: 0.75}
    )
    assert levels == same
    assert set(levels) == {"Recall", "Mixture", "Gaussian process", "Exact ceiling"}
    assert [b for b in batches if b[0] == "compositional"] == [("compositional", 8, 1, 0), ("compositional", 8, 1, 1)]
    rows = {(row[0], row[1]): row[2:] for row in found.rows}
    assert rows["HYLA", "1"][:5] == ("0.940 ± 0.010", "0.800 ± 0.010", "0.000 ± 0.010", "0.140", "0.200")
    assert rows["Softmax", "1"][3:5] == ("0.190", "0.200")
    assert {len(row) for row in found.rows} == {len(found.head)}
    assert "Runs: HYLA 1, Softmax 1." in found.pictures[0].caption
    assert {verdict.outcome for verdict in found.verdicts} == {UNDECIDED}
    assert found.numbers["HYLA"]["late"]["1"] == pytest.approx(0.2)

    assert [picture.stem for picture in found.pictures] == ["long", "long-paper"]
    measured, said = drawn[1]
    assert measured == {"HYLA": [0.8], "Softmax": [0.75]}
    assert said["printed"]["HYLA"] == pytest.approx((0.811, 0.078, 3), abs=5e-4)
    assert said["baselines"] == levels


@pytest.mark.parametrize("tests", [long.TESTS, long.RAVENS])
@pytest.mark.parametrize("seed", [6, 0])
def test_other_seeds_than_those_of_the_protocol_are_in_the_table_and_in_no_picture(seed, tests, study, drawn):
    alone = long.draw(study, tests)
    others = tuple(at(point, f"{point.run.name[:-1]}{seed}", seed) for point in study.points)
    both = long.draw(replace(study, points=(*others, *study.points)), tests)
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert alone.pictures == both.pictures
    assert [verdict.to_dict() for verdict in alone.verdicts] == [verdict.to_dict() for verdict in both.verdicts]
    assert {row[1] for row in both.rows} == {"1", str(seed)}
    repeated = [note for note in both.notes if note.startswith("With seed 6")]
    assert len(repeated) == (seed == 6 and tests is long.TESTS)


def test_ablations_are_beside_the_models_that_they_change(study, drawn):
    hyla, softmax = study.points
    found = long.draw(replace(study, points=(hyla, softmax, at(softmax, "hyla-linear-1"))), long.PARTS)
    assert list(drawn[0][0][0][1]) == ["HYLA", "Softmax", "HYLA − nonlinearity"]
    (verdict,) = found.verdicts  # the other ablations have no runs
    assert verdict.claim == "HYLA composes better than without its nonlinearity"
    assert verdict.parts[0].estimate.values == pytest.approx({1: 0.05})


def test_other_settings_and_other_lengths_have_pages_without_the_numbers_of_the_paper(study, drawn):
    """Its table is of length 32 and heads of width 2."""
    hyla, softmax = study.points
    wide = at(hyla, "hyla-width-8-1"), at(softmax, "softmax-width-8-1"), at(hyla, "softmax-dropout-1")
    settings = long.draw(replace(study, points=(*study.points, *wide)), long.WIDE)
    assert [picture.stem for picture in settings.pictures] == ["long"]
    assert "HYLA, width 8 1" in settings.pictures[0].caption
    assert {verdict.claim: verdict.parts[0].estimate.values[1] for verdict in settings.verdicts} == {
        "with heads of width 8 HYLA is better than softmax": pytest.approx(0.05),
        "HYLA composes better with heads of width 8": 0.0,
        "softmax composes better with dropout on its code": pytest.approx(0.05),
    }
    short = tuple(at(point, f"length-16-{point.run.name}") for point in study.points)
    length = long.draw(replace(study, points=short), long.PRIMARY)
    assert [picture.stem for picture in length.pictures] == ["long"]
    assert [verdict.parts[0].estimate.values for verdict in length.verdicts] == [pytest.approx({1: 0.05})]
    assert {row[0] for row in length.rows} == {"HYLA", "Softmax", *long.BASELINES.values()}


def test_the_page_of_widths_has_a_line_per_kind_of_heads(study, drawn):
    hyla, softmax = study.points
    found = long.draw_width(replace(study, points=(hyla, softmax, at(hyla, "hyla-width-8-1"))))
    ((_, curves, _),) = drawn[0][0]
    assert curves == {"HYLA": {2: [0.8], 8: [0.8]}, "Softmax": {2: [0.75]}}
    assert [verdict.claim for verdict in found.verdicts] == ["with heads of width 2 HYLA is better than Softmax"]


def test_the_page_of_raven_matrices_has_their_baselines_and_tests(study, drawn):
    points = []
    for seed, point in itertools.product((0, 1), study.points):
        train = replace(point.run.train, evaluate=("validation", "iid", "compositional"))
        run = replace(point.run, task=Sraven(features=2, values=5), train=train)
        scores = {split: {"accuracy": s["r2"], "accuracy_se": 0.01} for split, s in point.result.scores.items()}
        del scores["novel"]
        name = f"sraven-{point.run.name[:-2]}-{seed}"
        courses = {split: point.course(split) for split in ("iid", "compositional")}
        points.append(at(FinishedRun(run, replace(point.result, scores=scores), courses), name, seed))
    found = long.draw(replace(study, points=tuple(points)), long.RAVENS)
    ((course, _), labels) = drawn[0]
    assert course[1]["Softmax"][7.5] == pytest.approx([0.75])  # without seed 0, which stands apart
    assert set(course[2]) == {"Same slot", "Known combinations", "Exact ceiling"}
    assert labels["y_label"] == "accuracy on unseen combinations"
    claims = {verdict.claim[:2]: verdict for verdict in found.verdicts}
    assert list(claims) == ["1.", "4.", "6."]  # linear has no run, so 2, 3 and 5 are left out
    for number in ("1.", "6."):
        assert claims[number].parts[0].estimate.values == pytest.approx({1: 0.05})  # without seed 0
    rows = {(row[0], row[1]): row[2:] for row in found.rows}
    assert rows["HYLA", "0"][:3] == ("0.940 ± 0.010", "0.800 ± 0.010", "–")
    assert float(rows["Same slot", "1"][1]) < 0.5 < float(rows["Exact ceiling", "1"][1])
