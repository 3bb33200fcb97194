"""The long trainings: quantities of their courses, and their pages, drawn again from the committed runs."""

import argparse
import itertools
import json
import types
from dataclasses import replace

import pandas
import pytest
from drawn import facts_of
from planted import finished
from scripts import ROOT, loaded

from polyhead.analysis import figures
from polyhead.analysis.claims import NO, YES
from polyhead.models.size import parameters
from polyhead.papers import page
from polyhead.papers.hyla import long
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.recipes import RECIPES
from polyhead.papers.study import FinishedRun, Study
from polyhead.tasks import FuzzyLogic, Sraven

RESULTS = ROOT / "docs" / "results"
trainings = loaded("benchmarks", "long_trainings.py")
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


def test_the_page_on_width_has_a_line_per_kind_and_a_point_per_width_that_has_all_seeds(pages):
    (((_, curves, _),), _) = pages["width"].pictures[0]
    numbers = pages["width"].committed["numbers"]
    expected = {}
    for label, width in itertools.product(("HYLA", "Softmax", "Linear"), long.WIDTHS):
        by_seed = numbers.get(label if width == 2 else f"{label}, width {width}", {"unseen": {}})["unseen"]
        if set(by_seed) >= set(map(str, long.SEEDS)):
            expected.setdefault(label, {})[width] = [by_seed[str(seed)] for seed in long.SEEDS]
    assert curves == expected
    assert list(curves) == list(expected)


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


# ---------------------------------------------------------------------------------------------- rows of later additions
def test_rows_of_the_additions_change_only_what_they_say(capsys):
    main = trainings.training("hyla", 1)
    for percent in (30, 50):
        run = trainings.training(f"hyla-held-out-{percent}", 1)
        assert run.task == replace(main.task, held_out=percent / 100)
        assert (run.transformer, run.train) == (main.transformer, main.train)
    for row in ("softmax", "hyla"):
        equal, wide = trainings.training(f"equal-{row}-16", 1), trainings.training(f"{row}-width-16", 1)
        assert (equal.task, equal.train) == (wide.task, wide.train)
        assert equal.transformer.heads == trainings.training(row, 1).transformer.heads
        assert parameters(equal.model) == pytest.approx(parameters(wide.model), rel=1e-3)
    for row, like in trainings.TABLE_ROWS.items():
        run = trainings.training(row, 1)
        assert (run.task, run.train) == (main.task, trainings.training(like, 1).train)
        assert run.transformer.heads[0] == replace(ROWS[row].heads, heads=8, dim=2, value_dim=2)
    rows = set(trainings.CHANGED) | set(trainings.MODELS)
    assert rows | {"hyla-compete"} >= {*ROWS}
    assert {trainings.long.LONG.row_of(trainings.training(row, 1)) for row in rows if "length" not in row} <= rows
    options = argparse.Namespace(seeds=[2, 3], models=["hyla"], sraven=True, split=2, list=True)
    trainings.train(options)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["sraven-hyla-2", "sraven-split-2-hyla-3"]
    crossed, own = trainings.pilot("hyla", 3, 2), trainings.pilot("hyla", 3)
    assert crossed == replace(own, name=crossed.name, task=replace(own.task, split_seed=2))


@pytest.fixture
def study_of(tmp_path, monkeypatch):
    """A study of runs with planted scores on unseen combinations; figures become their content."""
    for kind in ("lines", "results"):
        monkeypatch.setattr(figures, kind, lambda content, **_: content)
    monkeypatch.setattr(long, "baselines_of", lambda point: {})

    def make(scored):
        runs, results = zip(*[(run, planted(run, tmp_path, score)) for run, score in scored], strict=True)
        return Study.of("page", long.LONG, "paper", tmp_path, runs, results)

    return make


def planted(run, folder, score):
    metric = run.task.metric
    scores = {split: {metric: score, f"{metric}_se": 0.004} for split in run.train.evaluate}
    courses = {split: {5000: {metric: score / 2}, run.train.steps: {metric: score}} for split in scores}
    return finished(run, folder, scores, courses)


def test_page_of_the_part_held_out(study_of):
    """At 30 and 50 % HYLA is ahead and softmax behind linear; HYLA drops less than softmax and more than linear."""
    scores = {"hyla": (0.9, 0.8, 0.7), "softmax": (0.8, 0.7, 0.4), "linear": (0.85, 0.75, 0.8)}
    scored = []
    for (model, by_percent), seed in itertools.product(scores.items(), long.SEEDS):
        for percent, score in zip(long.HELD_OUT, by_percent, strict=True):
            noise = 0.001 * (seed * (percent + len(model)) % 7)
            scored.append((trainings.training(long.of_held_out(model, percent), seed), score + noise))
    outcome = long.draw_held_out(study_of(scored))
    assert [verdict.outcome for verdict in outcome.verdicts] == [YES, NO, YES, NO, NO, YES]
    assert [part.verdict for part in outcome.verdicts[-2].parts] == [YES, NO]
    ((_, curves, _),) = outcome.pictures[0].figure
    assert [list(curve) for curve in curves.values()] == [[30, 50, 70]] * 3
    assert curves["Softmax"][70] == pytest.approx([0.4] * 5, abs=0.01)


def test_pages_of_table_a1_and_of_equal_parameters(study_of):
    scores = dict.fromkeys((*trainings.MODELS, *trainings.ABLATIONS, *trainings.TABLE_ROWS), 0.5)
    scores |= {"hyla-deep": 0.7, "linear-moe": 0.3, "equal-hyla-16": 0.8, "equal-softmax-16": 0.6}
    scored = []
    for (row, score), seed in itertools.product(scores.items(), long.SEEDS):
        noise = 0.002 * (seed * len(row) % 5)
        scored.append((trainings.training(row, seed), score + noise))
    study = study_of(scored)
    outcomes = {verdict.claim: verdict.outcome for verdict in long.draw(study, long.TABLE).verdicts}
    assert len(outcomes) == 6
    assert [claim for claim, outcome in outcomes.items() if outcome == YES] == [test.claim for test in long.TABLE[:2]]
    assert outcomes["mixture of experts helps each kind of heads"] == NO
    (verdict,) = long.draw(study, long.EQUAL).verdicts
    assert verdict.outcome == YES
    (_, beside) = long.draw(study, long.TABLE).pictures
    assert {long.NAMES[row] for row in ROWS} <= set(beside.figure)


def test_page_of_two_splits_and_three_networks(study_of):
    scored = []
    for split, seed in itertools.product((2, 3), (1, 2, 3)):
        scored.append((trainings.pilot("softmax", seed, split), 0.6))
        scored.append((trainings.pilot("hyla", seed, split), 0.6 + (0.1 if split == 3 else -0.1)))
    scored.append((trainings.pilot("hyla", 1), 0.9))  # its own split is neither
    outcome = long.draw_splits(study_of(scored))
    assert outcome.pictures[0].figure == {"split 2": pytest.approx([-0.1] * 3), "split 3": pytest.approx([0.1] * 3)}
    assert outcome.rows[0] == ("2", "1", "0.600", "0.500", "−0.100")
    assert outcome.verdicts == ()
    assert {"sraven-split"} < set(trainings.rows_by_digest().values())
