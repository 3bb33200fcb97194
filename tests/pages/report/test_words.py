"""The words of a report, by hand: names of mechanisms, the headline, floors, the course of training."""

import itertools
import pathlib
import re
import types
from dataclasses import replace

import numpy as np
import pytest
from reported import LOSSES, TASK, fabricate, folders, grouped, run_of, scored, small, written
from scipy.stats import ttest_ind

import polyhead as ph
from polyhead.analysis import figures
from polyhead.config.words import Floor, Words
from polyhead.pages.report import headline as text, runs
from polyhead.pages.report.export import _over_layers
from polyhead.pages.report.figures import dashes, spread, styles
from polyhead.pages.report.runs import Entry, SeedGroup, Summary
from polyhead.tasks import FuzzyLogic, Maths
from polyhead.tasks.task import Score
from polyhead.train.store.state import State, write_end

RULES = ph.SymbolicAttention(count=5)
DUAL = ph.Relational(1, symbols=RULES, relations=3)


# --------------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("heads", "name"),
    [
        ([ph.Hyla(4)], "HYLA"),
        ([ph.Linear(4, normalise="rms_heads")], "Linear (normalise rms_heads)"),
        ([ph.Softmax(2), ph.Hyla(2, value_depth=2)], "Softmax 2 + HYLA 2 (value depth 2)"),
        ([[ph.Softmax(4)], [ph.Hyla(4)]], "Softmax, then HYLA"),
        ([ph.Softmax(2), ph.Relational(2, relations=3)], "Softmax 2 + Relational 2 (3 relations)"),
        ([ph.Relational(4, symbols=ph.RelativeSymbols())], "Relational (symbols by offset)"),
        (
            [ph.Hyla(3), ph.Relational(1, symmetric=True, relation_init="package", symbols=ph.RelationalSymbols())],
            "HYLA 3 + Relational 1 (symmetric, relation init package, symbols by neighbours)",
        ),
    ],
)
def test_mechanisms_are_named(heads: list, name: str) -> None:
    assert runs.mechanism(run_of("hyla", heads=heads).model) == name


def test_an_encoder_that_differs_is_named() -> None:
    model = run_of("softmax", task=Maths()).model
    same = replace(model, causal=True, encoder=replace(model, inputs=Maths().source))
    other = replace(same, encoder=replace(same.encoder, heads=(ph.Softmax(1), DUAL)))
    assert runs.mechanism(same) == "Softmax"
    said = "Softmax 1 + Relational 1 (3 relations, symbols from a library), decoder Softmax"
    assert runs.mechanism(other) == said


def test_labels_are_unique_however_many_settings_differ() -> None:
    """Of four settings only three were named, and two groups of one name became one in figures and tables."""
    base = run_of("softmax")
    every = [
        replace(
            base,
            seed=seed,
            task=replace(TASK, split_seed=seed),
            model=replace(base.model, dim=dim),
            train=replace(base.train, lr=lr, batch_size=size, weight_decay=decay),
        )
        for dim, lr, size, decay, seed in itertools.product((16, 32), (1e-3, 3e-3), (16, 32), (0.1, 0.3), (0, 1))
    ]

    def groups(given: list[ph.Run]) -> list[SeedGroup]:
        return runs.groups([Entry(pathlib.Path("run"), run, (), None, ()) for run in given])

    found = groups(every)
    assert len({group.label for group in found}) == len(found) == 16
    assert {len(group.entries) for group in found} == {2}  # of two seeds, and of two seeds of the split
    assert found[1].label == "Softmax · dim 16 · batch_size 16 · lr 0.001 · weight_decay 0.3"
    few = groups([run for run in every if run.train.weight_decay == 0.1])
    assert {group.label.count("·") for group in few} == {3}
    pair = groups([every[0], every[8]])
    assert [group.label for group in pair] == ["Softmax · lr 0.001", "Softmax · lr 0.003"]
    assert runs.unequal(pair) == ["train.lr: 0.001 (Softmax · lr 0.001), 0.003 (Softmax · lr 0.003)"]


def test_runs_whose_data_lie_in_two_folders_have_one_task(tmp_path: pathlib.Path) -> None:
    made = [fabricate(tmp_path, run_of(name, task=Maths(folder=name)), None) for name in ("softmax", "hyla")]
    assert [group.label for group in grouped(made)] == ["Softmax", "HYLA"]


def test_mechanisms_have_colours_of_their_own() -> None:
    """A second group of softmax heads had the colour of relational ones, if these came first."""
    kinds = ["relational", "softmax", "softmax", "mixture", *["softmax"] * 4]
    found = [SeedGroup(f"{i}", kind, ()) for i, kind in enumerate(kinds)]
    assert len({colour for colour, _ in styles(found).values()}) == len(found)
    assert len(styles([*found, *(SeedGroup(f"more {i}", "hyla", ()) for i in range(9))])) == len(found) + 9


# ------------------------------------------------------------------------------------------------------------ headline
@pytest.mark.parametrize(
    ("scores", "headline"),
    [
        ({"softmax": [0.7, 0.72], "hyla": [0.5, 0.52]}, "Softmax beats HYLA on unseen combinations (R² 0.71)"),
        (
            {"hyla": [0.66, 0.68, 0.72], "softmax": [0.6, 0.65, 0.7]},  # p = 0.35
            "HYLA is ahead on unseen combinations (R² 0.69), but the seeds do not settle it",
        ),
        (
            {"hyla": [0.70, 0.71, 0.72], "softmax": [0.69, 0.72, 0.71], "linear": [0.1, 0.11, 0.12]},
            "HYLA beats Linear on unseen combinations (R² 0.71); Softmax is too close to call",
        ),
        (  # p = 0.028 and 0.027, 0.053 after Holm
            {"hyla": [0.70, 0.72, 0.74], "softmax": [0.645, 0.665, 0.685], "linear": [0.644, 0.664, 0.684]},
            "HYLA is ahead on unseen combinations (R² 0.72), but the seeds do not settle it",
        ),
        ({"hyla": [0.9], "softmax": [0.1, 0.1, 0.1]}, "HYLA is ahead on unseen combinations in these runs (R² 0.90)"),
        # errors over sequences of 0.022 each: 0.062 is two of the difference
        (
            {"softmax": [0.51], "hyla": [0.45]},
            "Softmax and HYLA are level on unseen combinations (R² 0.51 and 0.45, one seed)",
        ),
        ({"softmax": [0.52], "hyla": [0.45]}, "Softmax is ahead on unseen combinations in these runs (R² 0.52)"),
        ({"hyla": [1.0, 1.0], "softmax": [1.0, 1.0]}, "HYLA and Softmax are level on unseen combinations (R² 1.00)"),
        ({"linear": [0.3]}, "Linear reaches R² 0.30 on unseen combinations"),
    ],
)
def test_headline_claims_what_the_seeds_carry(tmp_path: pathlib.Path, scores: dict, headline: str) -> None:
    assert text.title(grouped(folders(tmp_path, scores))) == headline


def test_runs_that_diverged_are_said_to_have_no_finite_score(tmp_path: pathlib.Path) -> None:
    """They are finished: nobody can resume them."""
    nan = float("nan")
    found = grouped(folders(tmp_path / "all", {"hyla": [nan]}))
    assert text.title(found) == "No finite score on unseen combinations"
    wanted = "No finished run below has a finite score to compare: they diverged, or were not scored."
    assert text.verdict(found, {}) == [wanted]
    some = grouped(folders(tmp_path / "some", {"hyla": [0.9, nan], "softmax": [1.0, 1.0], "linear": [1.0, 1.0]}))
    said = text.verdict(some, {})
    assert "HYLA is not ranked: a seed has no finite score." in said
    assert "Softmax and Linear have the same mean." in said


def test_a_seed_that_failed_is_no_unfinished_run(tmp_path: pathlib.Path) -> None:
    """Training ends without a result when it diverges; the mean is then over the seeds that did not."""
    made = folders(tmp_path, {"hyla": [0.9, 0.8], "softmax": [0.7, 0.6]})
    (made[1] / "result.json").unlink()
    write_end(made[1], State.FAILED, "train: the loss of hyla is nan at step 61; lower train.lr")
    (found,) = [entry for entry in runs.read(made) if entry.folder == made[1]]
    why = "(train: the loss of hyla is nan at step 61)"
    assert found.notes == (f"hyla-1 failed after 60 of 100 steps {why}: curves only, not in the table.",)
    assert "Of HYLA a seed failed: the numbers are those of the other seeds." in text.verdict(grouped(made), {})
    assert text.verdict(grouped([made[1]]), {}) == [
        "No finished run below has a finite score to compare: they diverged, or were not scored."
    ]
    write_end(made[1], State.STOPPED, "interrupted")
    assert "resume" in text.verdict(grouped([made[1]]), {})[0]


def test_rows_left_out_of_a_model_that_comes_along_are_not_lost() -> None:
    (entry,) = runs.read(["fuzzy-hyla"])
    assert entry.notes == ()
    assert len(entry.curve("eval", "r2", "compositional")[0]) == 20


def test_a_difference_is_tested_by_welch() -> None:
    a, b = (0.5, 0.7, 0.6), (0.2, 0.4)
    wanted = ttest_ind(a, b, equal_var=False).pvalue
    assert text.p_value(runs.summary(a, None), runs.summary(b, None)) == pytest.approx(wanted)
    assert text.p_value(runs.summary(a, None), runs.summary([0.1], 0.1)) is None
    sure = runs.summary((0.4, 0.4), None)
    assert text.p_value(sure, runs.summary((0.4, 0.4, 0.4), None)) == 1.0  # no spread, however means are rounded
    assert text.p_value(sure, runs.summary((0.25, 0.25), None)) == 0.0
    for diverged in ((np.nan, np.nan), (0.4, np.nan), (0.4, 0.4, np.nan)):  # seeds that diverged say nothing for sure
        assert np.isnan([runs.summary(diverged, None).mean, runs.summary(diverged, None).error]).all()


# -------------------------------------------------------------------------------------------------------------- floors
@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (0.53, "Softmax is above it."),
        (0.52, "Softmax is level with it, so no score here is evidence of composition."),  # 1.7 joint errors above
        (0.20, "Softmax is below it, so no score here is evidence of composition."),
    ],
)
def test_scores_are_set_against_the_best_floor(tmp_path: pathlib.Path, score: float, sentence: str) -> None:
    found = grouped(folders(tmp_path, {"softmax": [score - 0.01, score, score + 0.01]}))
    means = {"ridge": 0.3, "gaussian_process": 0.5, "ceiling": 0.99}
    table = {name: {"compositional": Summary(m, 0.01, (m,), "sequences")} for name, m in means.items()}
    said = " ".join(text.verdict(found, table))
    assert f"(Gaussian process) scores 0.500: {sentence}" in said
    assert "scores 0.990, the ceiling" in said
    assert f"falls by {0.9 - score:.3f} for Softmax" in said
    first, further = text.opening(found, table)
    assert len(first) <= 3
    assert sorted([*first, *further]) == sorted([*text.course(found), *text.verdict(found, table)])
    assert [words in line for words, line in zip(("falls by", "scores 0.500"), first[1:], strict=True)] == [True, True]
    plain, rest = text.opening(found, table, "In full it is 0.9.")
    assert (plain, rest) == ([*first[1:], "In full it is 0.9."], [first[0], *further])


def test_floors_that_a_task_draws_are_lines() -> None:
    """Those of a user's task, too: the lines were a list of names."""
    floors = {"guess": Floor("Guess", "guesses", drawn=True), "mean": Floor("Mean", "takes the mean")}
    own = types.SimpleNamespace(words=Words(floors=floors))
    assert dashes(own, ["mean", "chance", "guess", "ceiling"]) == {"guess": "dash", "ceiling": "dot"}
    assert dashes(own, ["chance", "mean"]) == {"chance": "dash"}
    fuzzy = {"gaussian_process": "dash", "recall": "dashdot", "mix": "longdash", "ceiling": "dot"}
    assert dashes(TASK, FuzzyLogic().words.floors) == fuzzy


def test_names_beside_a_curve_stay_apart_and_in_the_picture() -> None:
    """Below the lowest height a name was not drawn."""
    placed = spread({"copy": 0.01, "known": 0.04, "counts": 0.0, "slot": 0.5}, 0.1, -0.03)
    assert placed == pytest.approx({"counts": -0.03, "copy": 0.07, "known": 0.17, "slot": 0.5}, abs=0.02)
    heights = [placed[name] for name in ("counts", "copy", "known", "slot")]
    assert min(heights) == -0.03
    assert min(np.diff(heights)) >= 0.1 - 1e-9


def test_floors_are_means_over_the_seeds_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their error is that of `Score.over`; what is known exactly has none.  They say of how many sequences they are."""
    asked = []

    def floors(task: FuzzyLogic, split: str, *, sequences: int, seed: int) -> dict[str, Score]:
        asked.append((split, sequences, seed))
        drawn, apart = [(0.4, 0.03), (0.42, 0.04)][task.split_seed], [(0.4, 0.03), (0.6, 0.04)][task.split_seed]
        exact = Score(0.5 + task.split_seed, 0.0, 0)
        return {"drawn": Score(*drawn, sequences), "apart": Score(*apart, sequences), "exact": exact}

    monkeypatch.setattr(FuzzyLogic, "floors", floors)
    monkeypatch.setattr(FuzzyLogic, "count", lambda self, split: 150 if split == "novel" else None)
    tasks = [replace(TASK, split_seed=seed) for seed in (0, 1)]
    entries = [
        Entry(pathlib.Path("run"), run_of(kind, i, task), (), None, ())
        for kind in ("softmax", "hyla")
        for i, task in enumerate(tasks)
    ]
    table = runs.baselines(runs.groups(entries), ["iid", "novel"], sequences=333, progress=lambda line: None)
    assert asked == [("iid", 166, 0), ("iid", 166, 1), ("novel", 166, 0), ("novel", 166, 1)]
    drawn = table["drawn"]["iid"]
    assert (drawn.mean, drawn.error) == pytest.approx((0.41, (0.03**2 + 0.04**2) ** 0.5 / 2))
    assert (drawn.values, drawn.count, table["drawn"]["novel"].count) == ((0.4, 0.42), 332, 300)
    assert table["apart"]["iid"].error == pytest.approx(0.1)
    assert table["exact"]["iid"] == Summary(1.0, None, (0.5, 1.5), "sequences")
    assert [text.span(counts) for counts in ([332, 300], [2000, 2000])] == ["300 to 332", "2,000"]


def test_a_still_figure_of_probes_has_the_chance_of_all_mechanisms(monkeypatch) -> None:
    """It had that of the last one; the page has the mean."""
    score = Summary(0.5, 0.1, (0.4, 0.6), "seeds")
    cells = {("HYLA", (1, "rule")): (score, 0.1), ("Softmax", (1, "rule")): (score, 0.3)}
    monkeypatch.setattr(figures, "lines", lambda panels, path, **how: panels)
    ((target, series, levels),) = _over_layers(cells, "macro F1")(pathlib.Path("a.png"))
    assert (target, series) == ("rule", {"HYLA": {2: [0.4, 0.6]}, "Softmax": {2: [0.4, 0.6]}})
    assert levels == {"chance": {2: pytest.approx(0.2)}}


# -------------------------------------------------------------------------------------------------- course of training
STEPS = (0, 40, 50, 60, 100)
COURSES = {  # of two seeds: scores after these steps of 100, known and unseen
    "hyla": [
        ((-1, 0.1, 0.25, 0.4, 0.8), (-1, 0.1, 0.3, 0.4, 0.5)),
        ((-1, 0.1, 0.35, 0.4, 0.9), (-1, 0.1, 0.1, 0.4, 0.7)),
    ],
    "softmax": [
        ((-1, 0.1, 0.5, 0.6, 0.6), (-1, 0.1, 0.4, 0.2, 0.1)),
        ((-1, 0.1, 0.5, 0.6, 0.8), (-1, 0.1, 0.2, 0.2, 0.3)),
    ],
}


def with_courses(root: pathlib.Path, kept: tuple[int, ...] = STEPS) -> list[pathlib.Path]:
    made = []
    for name, seeds in COURSES.items():
        for seed, (known, unseen) in enumerate(seeds):
            every = zip(STEPS, known, unseen, strict=True)
            rows = [row for step, a, b in every if step in kept for row in scored(step, iid=a, compositional=b)]
            scores = {"iid": (known[-1], 0.01), "compositional": (unseen[-1], 0.01)}
            made.append(fabricate(root, run_of(name, seed), scores, [*LOSSES, *rows]))
    return made


@pytest.mark.parametrize(
    ("kept", "hyla", "words"),
    [
        (STEPS, (0.3, 0.85, 0.2, 0.6), "In the second half of training HYLA gained 0.550 on known combinations"),
        # the last score before the half stands in, and that before training does not
        ((40, 60, 100), (0.1, 0.85, 0.1, 0.6), "After step 40 of training HYLA gained 0.750 on known combinations"),
        ((0, 60, 100), None, None),
    ],
)
def test_from_the_score_at_half_of_the_training_to_its_last(tmp_path, kept, hyla, words):
    found = grouped(with_courses(tmp_path, kept))
    rows = text.courses(found)
    assert [row[0] for row in rows] == (["HYLA", "Softmax"] if hyla else [])  # the best first, on unseen combinations
    assert not hyla or rows[0][1:] == pytest.approx(hyla)
    assert [line.startswith(words) for line in text.course(found)] == [True] * bool(hyla)


def test_a_lower_error_is_a_gain(monkeypatch, tmp_path):
    monkeypatch.setattr(FuzzyLogic, "better", "lower")
    found = grouped(with_courses(tmp_path))
    (words,) = text.course(found)
    assert words.startswith("In the second half of training Softmax lost 0.200 on known combinations and gained 0.100")
    (gap,) = text._gap(text.ranked(found), text.where(found))
    assert gap == "From known to unseen combinations the score rises by −0.500 for Softmax and −0.250 for HYLA."


def test_a_page_opens_with_a_picture_and_three_sentences(tmp_path, monkeypatch):
    small(monkeypatch, SEQUENCES=100)
    page = written(with_courses(tmp_path), tmp_path / "r.html").content
    header = page.partition("<header>")[2].partition("</header>")[0]
    assert header.index("<h1") < header.index("<figure>") < header.index('<p class="lead">') < header.index("<nav>")
    assert "<li>" not in header
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', header)
    assert lead.startswith(
        "In the second half of training HYLA gained 0.550 on known combinations and 0.400 on unseen combinations; "
        "Softmax gained 0.200 on known combinations and lost 0.100 on unseen combinations. From known to unseen "
        "combinations the score falls by 0.250 for HYLA and 0.500 for Softmax. The best predictor that composes"
    )
    assert len(re.findall(r"[.](?: |$)", lead)) == 3
    assert "Compositional R² (mean ± standard error over 2 seeds), best first: HYLA" in page.partition("</header>")[2]
