"""`reproduce`: train the missing runs, draw, write results and page."""

import json
import re
from dataclasses import replace

import pytest
from commands import mistake

import polyhead.papers.reproduce as module
from polyhead import train as training
from polyhead.analysis.claims import Estimate, above
from polyhead.cli import dispatch as cli
from polyhead.config import digest
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.page import write_page
from polyhead.papers.recipes import STUDIES, for_seeds
from polyhead.papers.reproduce import redraw, reproduce
from polyhead.scale.sweep import Failure
from polyhead.tasks.sraven.counts import tasks


def test_a_figure_from_nothing(trained, tmp_path, capsys):
    code = cli.main(["reproduce", "fig-5d", "--scale", "smoke", "--folder", str(tmp_path), "--device", "cpu"])
    assert code == 0
    printed = capsys.readouterr().out
    assert "SRAVEN gets harder with the number of features" in printed
    assert f"values: {tmp_path}/fig-5d/index.html" in printed
    results_path = tmp_path / "fig-5d" / "results.json"
    results = json.loads(results_path.read_text())
    runs = STUDIES["fig-5d"]("smoke")
    assert [run["digest"] for run in results["runs"]] == [digest(run) for run in runs]
    assert {run["seed"] for run in results["runs"]} == {0, 1}
    assert set(results["runs"][0]["scores"]) == {"validation", "iid", "compositional"}
    assert results["command"] == "polyhead reproduce fig-5d --scale smoke"
    assert results["format"] == 1
    assert {verdict["outcome"] for verdict in results["verdicts"]} == {"undecided"}  # two seeds
    assert "validation" not in json.dumps(results["numbers"])
    page = (tmp_path / "fig-5d" / "index.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert page.count("<svg ") == 1
    text = (tmp_path / "fig-5d" / "README.md").read_text()
    assert "![Fig. 5D: number of features](fig-5d.svg)" in text
    assert "| SRAVEN gets harder with the number of features | **undecided** |" in text
    assert digest(runs[0]) in page

    written_at = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    page_path, *_ = reproduce("fig-5d", "smoke", folder=tmp_path, device="cpu", progress=False)
    assert page_path == tmp_path / "fig-5d" / "index.html"
    assert json.loads(results_path.read_text())["runs"] == results["runs"]
    assert len(written_at) == len(runs)
    assert all(path.stat().st_mtime_ns == time for path, time in written_at.items())  # none is trained again


def test_more_seeds_are_those_of_the_recipes():
    """The runs of the first seed, given other seeds, are the recipe's own runs: names, splits and digests."""
    for figure in ("fig-5d", "order", "maths", "lm-bytes"):
        runs = STUDIES[figure]("smoke")
        recipe_runs = {(run.name, digest(run)) for run in runs}
        assert {(run.name, digest(run)) for run in for_seeds(runs, len({run.seed for run in runs}))} == recipe_runs


def test_a_figure_with_another_number_of_seeds(trained, tmp_path):
    reproduce("fig-5c", "smoke", folder=tmp_path, device="cpu", seeds=1, progress=False)
    results = json.loads((tmp_path / "fig-5c" / "results.json").read_text())
    assert {(run["seed"], run["task"]["split_seed"]) for run in results["runs"]} == {(0, 0)}
    assert (results["command"], results["seeds"]) == ("polyhead reproduce fig-5c --scale smoke --seeds 1", 1)
    redraw(tmp_path / "fig-5c", tmp_path / "again")
    assert len(json.loads((tmp_path / "again" / "results.json").read_text())["runs"]) == len(results["runs"])


def test_figures_without_runs(tmp_path):
    page, outcome, failures = reproduce("fig-a9", "smoke", folder=tmp_path)
    assert not failures
    assert f"{tasks(4).paper:,}" in page.read_text()
    assert outcome.numbers["tasks"][4] == {"paper": 188_760, "exact": tasks(4).exact}
    page, outcome, failures = reproduce("table-a2", "smoke", folder=tmp_path)
    assert [row[:2] for row in outcome.rows] == [("4", "4"), ("4", "8"), ("4", "16")]
    assert len(outcome.verdicts) == 2
    assert "0.0032 ± 0.0009" in page.read_text()


def test_runs_that_fail_are_named_and_left_out(monkeypatch, tmp_path, capsys):
    def sweep(runs, folder, **_):
        first = training.run(replace(runs[0], folder=str(folder / "one")), progress=False)
        return [first, *(Failure(run.name, folder, 1, "no memory left") for run in runs[1:])]

    monkeypatch.setattr(module, "sweep", sweep)
    code = cli.main(["reproduce", "fig-5c", "--scale", "smoke", "--folder", str(tmp_path), "--device", "cpu"])
    assert code == 1
    assert "no memory left" in capsys.readouterr().err
    results = json.loads((tmp_path / "fig-5c" / "results.json").read_text())
    assert len(results["failures"]) == len(STUDIES["fig-5c"]("smoke")) - 1
    assert "no memory left" in (tmp_path / "fig-5c" / "index.html").read_text()


def test_no_finished_run_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "sweep", lambda runs, folder, **_: [Failure(r.name, folder, 1, "broken") for r in runs])
    with pytest.raises(ValueError, match=r"reproduce: none of the 12 runs of fig-5c finished; broken"):
        reproduce("fig-5c", "smoke", folder=tmp_path, device="cpu")


@pytest.mark.parametrize("content", ['{"format": 0}', "{}", "[", '["format"]'])
def test_results_of_another_version_are_kept(content, tmp_path, capsys):
    (tmp_path / "fig-a9").mkdir()
    path = tmp_path / "fig-a9" / "results.json"
    path.write_text(content)
    assert f"{path} has format" in mistake(capsys, ["reproduce", "fig-a9", "--folder", str(tmp_path)])
    assert path.read_text() == content


def test_the_page_says_what_holds(tmp_path):
    difference = Estimate(0.1, 0.01, 9.0)
    verdicts = (above("a <claim>", {"one − other": difference}), above("b", {"other − one": -difference}))
    row = {"model": "HYLA", "score": "0.5 ± 0.1"}
    outcome = FigureOutcome(table=[row], verdicts=verdicts, notes=["a note"])
    content = {"title": "Fig. 0", "scale": "small", "command": "c", "date": "d", "environment": {}}
    text = write_page(tmp_path / "index.html", {**content, "failures": [], "runs": []}, outcome).read_text()
    expected = ("Yes: a &lt;claim&gt;.", ">no</td>", "0.5 ± 0.1", "a note", "Fig. 0")
    for words in (*expected, "+0.100 ± 0.010", "95 % interval +0.077 to +0.123"):
        assert words in text
    assert "<claim>" not in text
