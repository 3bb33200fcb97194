"""A figure redrawn from its results.json: the same numbers, new verdicts and baselines, no training."""

import json
import math
import pathlib

import pytest
from drawn import facts_of
from some import some

from polyhead.analysis import figures
from polyhead.papers import outcome, page
from polyhead.papers.recipes import FIGURES
from polyhead.papers.reproduce import described, redraw

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "small"
REDRAWN = (
    *("fig-2c", "fig-a3", "fig-4a", "fig-4a-heads", "fig-4b", "fig-5c", "fig-5d", "fig-a5", "table-a1", "table-a3"),
    *("games", "sorting", "order", "set", "maths", "images"),
)
"""The figures of docs/results that need only their results.json: neither models nor texts."""


def without_pictures(monkeypatch):
    """Draw nothing: pictures take most of the time."""
    for kind in ("lines", "results"):
        monkeypatch.setattr(figures, kind, lambda content, **_: None)
    monkeypatch.setattr(figures, "save", lambda figure, path: path.write_text("</svg>"))
    monkeypatch.setattr(page, "figure_as_svg", lambda figure, caption, name: caption)


def same_verdict(actual, expected):
    """To the last digit; a Gaussian process, the floor of fig-a3, has other last digits on other machines."""
    claim, verdict, numbers = facts_of(expected)
    assert facts_of(actual)[:2] == (claim, verdict)
    for (name, *values), (expected_name, *expected_values) in zip(facts_of(actual)[2], numbers, strict=True):
        assert name == expected_name
        assert values == (pytest.approx(expected_values, rel=1e-9) if name.startswith("floor") else expected_values)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure", REDRAWN)
def test_committed_results_are_drawn_again(figure, tmp_path, monkeypatch):
    """Claims with their parts, rows and numbers of real runs.  Without baselines, which take minutes."""
    measured = outcome._baseline_scores

    def baseline_scores(task, split, sequences, seed):
        """None but those that a claim of fig-a3 compares."""
        compared = figure == "fig-a3" and (split, task.length, task.held_out) == ("novel", 32, 0.7)
        return measured(task, split, sequences, seed) if compared else {}

    monkeypatch.setattr(outcome, "_baseline_scores", baseline_scores)
    without_pictures(monkeypatch)
    before = json.loads((RESULTS / figure / "results.json").read_text())
    path, _ = redraw(RESULTS / figure, tmp_path)
    after = json.loads((tmp_path / "results.json").read_text())
    assert path == tmp_path / "index.html"
    assert all((tmp_path / f"{stem}.svg").exists() for stem in before["pictures"])
    assert after.keys() == {*before, "drawn"}
    computed_anew = ("verdicts", "notes", "head", "rows", "numbers", "drawn")
    assert [name for name in after if name not in computed_anew and after[name] != before[name]] == []
    for actual, expected in zip(after["verdicts"], before["verdicts"], strict=True):
        same_verdict(actual, expected)
    assert set(after["notes"]) <= {note.replace("Floors", "Baselines") for note in before["notes"]}
    assert after["head"] == before["head"][: len(after["head"])]
    for row in some(after["rows"]):
        assert row in [full_row[: len(row)] for full_row in before["rows"]]
    assert after["numbers"].keys() == before["numbers"].keys()
    for setting, numbers in after["numbers"].items():
        assert numbers.items() <= before["numbers"][setting].items()
        left_out = before["numbers"][setting].keys() - numbers.keys()
        assert left_out.isdisjoint(FIGURES[figure].paper.models)


@pytest.fixture
def write_results(study_of, tmp_path, monkeypatch):
    """results.json of a figure with planted scores."""
    monkeypatch.setattr(outcome, "BASELINE_SEQUENCES", 60)
    without_pictures(monkeypatch)

    def write(figure):
        study = study_of(figure, lambda run: 0.5 + 0.1 * ("hyla" in run.name) + 0.01 * run.seed)
        folder = tmp_path / "made" / figure
        folder.mkdir(parents=True)
        content = described(FIGURES[figure].title, study, FIGURES[figure].draw(study))
        (folder / "results.json").write_text(json.dumps(content))
        return folder, content

    return write


def test_verdicts_and_baselines_are_of_today(write_results, monkeypatch):
    folder, before = write_results("fig-5c")
    monkeypatch.setattr(outcome, "BASELINE_SEQUENCES", 100)
    before |= {"verdicts": [], "head": ["old"], "title": "<b>\x1b[31m"}
    (folder / "results.json").write_text(json.dumps(before))
    redraw(folder / "results.json")
    after = json.loads((folder / "results.json").read_text())
    assert [verdict["outcome"] for verdict in after["verdicts"]] == ["undecided"]  # two seeds
    assert after["head"] != ["old"]
    assert (after["date"], after["runs"]) == (before["date"], before["runs"])
    assert (folder / "README.md").read_text().startswith("# &lt;b&gt;\\x1b[31m\n")
    for name in ("command", "environment", "training_seconds"):
        (folder / "results.json").write_text(json.dumps(before | {name: ()}))
        with pytest.raises(ValueError, match=r"^reproduce: .*results.json is damaged \(\w+Error: .*\)$"):
            redraw(folder)


def test_scores_during_training_are_kept_and_drawn_again(write_results, tmp_path, monkeypatch):
    drawn_panels = []
    monkeypatch.setattr(figures, "lines", lambda panels, **_: drawn_panels.append(panels))
    folder, content = write_results("order")
    redraw(folder, tmp_path / "new")
    assert all(list(row["courses"]["training loss"]) == [str(row["steps"])] for row in some(content["runs"]))
    assert len(drawn_panels) == 2
    assert drawn_panels[0] == drawn_panels[1]
    ((_, series, _),) = drawn_panels[1]
    assert series["Softmax"] == {1: [0.25, 0.255], 2: [0.5, 0.51]}  # planted at half of the steps and at the end


def test_a_score_that_is_no_number_is_null_in_json(write_results, tmp_path):
    """`write_results` writes NaN, as it was; drawn again from null, the page is the same."""
    folder, before = write_results("order")
    row = before["runs"][0]
    split = next(split for split in row["courses"] if split in row["scores"])
    row["scores"][split]["accuracy"] = row["courses"][split]["1"] = math.nan
    (folder / "results.json").write_text(json.dumps(before))
    redraw(folder, tmp_path / "new")
    redraw(tmp_path / "new", tmp_path / "again")
    texts = [(tmp_path / name / "results.json").read_text() for name in ("new", "again")]
    new, again = (json.loads(text, parse_constant=pytest.fail) | {"drawn": None} for text in texts)
    assert new == again
    assert new["runs"][0]["scores"][split]["accuracy"] is None


def test_what_cannot_be_drawn_again_is_refused_in_one_line(write_results, tmp_path):
    """What needs more than final scores, and another figure than was asked for, or than this version's."""
    folder, before = write_results("order")
    for row in before["runs"]:
        del row["courses"]  # as in results of older versions
    (folder / "results.json").write_text(json.dumps(before))
    with pytest.raises(ValueError, match=r"^reproduce: order is drawn from more than the final scores that .* trains"):
        redraw(folder, tmp_path / "new")
    with pytest.raises(ValueError, match="is of order, not of set"):
        redraw(folder, figure="set")
    with pytest.raises(ValueError, match=r"no/results\.json does not exist"):
        redraw(tmp_path / "no" / "results.json")
    before["runs"][0]["digest"] = "0" * 12
    (folder / "results.json").write_text(json.dumps(before))
    with pytest.raises(ValueError, match=r"1 of its \d+ runs are not of this version's recipe; train them again"):
        redraw(folder)
