"""The report on run folders made by hand: every number is known beforehand."""

import math
import os
import pathlib
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from refusals import refusing
from reported import TASK, fabricate, folders, plain, run_of, scored, small, written

import polyhead as ph
from polyhead.pages.report import codes as report_codes, writer as report


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


# ------------------------------------------------------------------------------------------------------------- numbers
ONE = ["0.900 ± 0.011", "0.500 ± 0.022", "one seed", "1,234", "60"]


@pytest.mark.parametrize(
    ("scores", "softmax", "hyla", "said"),
    [
        (  # deviations -.03 -.01 .04: variance .0026 / 2, error sqrt(.0013 / 3)
            {"softmax": [0.7, 0.72, 0.77], "hyla": [0.5, 0.5, 0.5]},
            ["0.900 ± 0.000", "0.730 ± 0.021", "3 seeds", "1,234", "61"],
            ["0.900 ± 0.000", "0.500 ± 0.000", "3 seeds", "1,234", "61"],
            ("Softmax beats HYLA", "± is the standard error over seeds; parameters"),
        ),
        (
            {"softmax": [0.7], "hyla": [0.5]},
            ["0.900 ± 0.011", "0.700 ± 0.022", "one seed", "1,234", "60"],
            ONE,
            ("with one seed each, other seeds may differ", "the order of two mechanisms may change with the next seed"),
        ),
        (
            {"softmax": [math.nan], "hyla": [0.5]},
            ["0.900 ± 0.011", "–", "one seed", "1,234", "60"],
            ONE,
            ("softmax-0 has scores that are not finite", "HYLA reaches R² 0.50"),
        ),
    ],
)
def test_results(tmp_path: pathlib.Path, scores: dict, softmax: list, hyla: list, said: tuple) -> None:
    page = written(folders(tmp_path, scores), tmp_path / "r.html")
    assert (page.cells("Softmax"), page.cells("HYLA")) == (softmax, hyla)
    assert all(words in page.words for words in said)


def test_floors_and_ceiling_are_rows_and_lines(tmp_path: pathlib.Path) -> None:
    page = written(folders(tmp_path, {"softmax": [0.7, 0.71]}), tmp_path / "r.html")
    floors = TASK.floors("compositional", sequences=300)
    for name, label in (("gaussian_process", "Gaussian process"), ("ridge", "Ridge"), ("ceiling", "Exact ceiling")):
        score = f"{floors[name].mean:.3f} ± {floors[name].standard_error:.3f}".replace("-", "−")
        assert page.cells(label)[1:3] == [score, "300 sequences"]
    lines = [shape["x0"] for shape in page.figures[0]["layout"]["shapes"]]
    assert lines == pytest.approx(
        sorted(floors[name].mean for name in ("recall", "gaussian_process", "mix", "ceiling"))
    )
    heights = [shape["y0"] for shape in page.axis("compositional R²")["layout"]["shapes"]]
    assert sorted(heights) == pytest.approx(sorted(score.mean for score in floors.values()))


def test_scores_on_validation_data_alone_are_in_the_table(tmp_path: pathlib.Path) -> None:
    """The headline had them, and the table had columns of dashes."""
    page = written([fabricate(tmp_path, run_of("softmax"), {"validation": (0.4, 0.1)})], tmp_path / "r.html")
    assert "Softmax reaches R² 0.40 on the validation split" in page.words
    assert page.cells("Softmax")[0] == "0.400 ± 0.100"


def test_rows_of_the_figure_are_ranked_as_those_of_the_table(tmp_path: pathlib.Path) -> None:
    """A score that is not a number left the others in any order."""
    scores = {"hyla": [0.7], "linear": [math.nan], "softmax": [0.6]}
    page = written(folders(tmp_path, scores), tmp_path / "r.html")
    rows = page.figures[0]["layout"]["yaxis"]["categoryarray"]
    assert [name for name in rows if name in ("HYLA", "Linear", "Softmax")] == ["Softmax", "HYLA"]  # the last is on top
    assert page.words.index("HYLA 0.900") < page.words.index("Softmax 0.900") < page.words.index("Linear 0.900")


def test_curves_are_the_rows_of_the_metrics(tmp_path: pathlib.Path) -> None:
    """Also of a run that is not finished, of which there are only curves."""
    made = [*folders(tmp_path, {"softmax": [0.7]}), fabricate(tmp_path, run_of("hyla"), None)]
    page = written(made, tmp_path / "r.html")
    loss = page.axis("training loss")["data"]
    steps, losses = [20, 40, 60], [1 / 20, 1 / 40, 1 / 60]
    assert [(t["name"], t["x"], t["y"]) for t in loss] == [(n, steps, losses) for n in ("Softmax", "HYLA")]
    assert [(t["line"]["color"], t["opacity"]) for t in loss] == [("#0072b2", 1.0), ("#009e73", 0.5)]
    assert "hyla-0 is unfinished (60 of 100 steps): curves only, not in the table." in page.words
    assert "Softmax reaches" in page.words
    with pytest.raises(StopIteration):
        page.cells("HYLA")
    unfinished = written(made[1:], tmp_path / "r.html")
    assert "No finished run with a score on unseen combinations yet" in unfinished.words


def test_scores_that_are_not_finite_leave_the_axis_as_it_is(tmp_path: pathlib.Path) -> None:
    made = [fabricate(tmp_path / "a b", run_of("hyla"), None, scored(20, iid=math.nan) + scored(40, iid=math.inf))]
    made += [fabricate(tmp_path, run_of("softmax"), {"iid": (0.7, 0.1)}, scored(20, iid=0.3) + scored(40, iid=0.7))]
    page = written(made, tmp_path / "r.html")
    low, high = page.axis("iid R²")["layout"]["yaxis"]["range"]
    assert low < 0.3 < 1 < high
    assert f"python -m polyhead.train '{made[0]}/config.json'" in page.words  # a command for a shell


# ------------------------------------------------------------------------------------------------------ codes, probes
def test_maps_and_probes_of_every_layer(tmp_path: pathlib.Path) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]}, checkpoint=True)
    page = written(made, tmp_path / "r.html")
    maps = [figure for figure in page.figures if figure["maps"]]
    assert len(maps) == 2 * 2 * 4
    assert all(len(f["maps"][method][i]) == 40 for f in maps for method in ("tsne", "pca") for i in (0, 1))
    rows = [ph.analysis.probe_model(ph.train.load_model(folder)[1], TASK, sequences=200, seed=0) for folder in made]
    wanted = [r for by in rows for r in by if (r["query"], r["layer"], r["target"]) == ("fixed", 1, "term 2")]
    numbers = wanted[1]["f1"], sum(row["chance"] for row in wanted) / 2
    assert page.cells("layer 2, term 2 one query")[1:] == [f"{number:.3f}" for number in numbers]
    assert "scored on 200 of unseen combinations" in page.words


def test_maps_are_of_unseen_combinations_with_one_context() -> None:
    model, same = ph.Transformer(run_of("hyla").model), replace(TASK, inputs="fixed_context")
    _, found = report_codes.code_maps(model, TASK, points=60)
    (_, codes), _ = ph.analysis.query_codes(model, same, "compositional", 60, seed=0, purpose="maps")
    np.testing.assert_array_equal(found.codes, codes)
    function, *terms = (found.labels[name].tolist() for name in ("function", "term 1", "term 2"))
    pairs = list(zip(*terms, strict=True))
    assert len(set(zip(pairs, function, strict=True))) == len(set(pairs)) == len(set(function))


# ------------------------------------------------------------------------------------------------------- damaged, odd
def test_torn_rows_and_missing_or_damaged_checkpoints_are_noted(tmp_path: pathlib.Path) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]}, checkpoint=True)
    with (made[0] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    (made[0] / "checkpoint.safetensors").unlink()
    path = made[1] / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    page = written(made, tmp_path / "r.html")
    assert "softmax-0: 1 of 6 lines of metrics.jsonl cannot be read." in page.words
    assert "softmax-0: no code maps and probes (" in page.words
    assert "hyla-0: no code maps and probes (" in page.words
    assert not [figure for figure in page.figures if figure["maps"]]


def test_codes_of_a_task_without_labels_are_not_probed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a task of one's own whose latents and targets are all floats."""
    monkeypatch.setattr(report_codes, "probe_model", lambda *given, **options: [])
    page = written(folders(tmp_path, {"softmax": [0.7]}, checkpoint=True), tmp_path / "r.html")
    assert "softmax-0: no code maps and probes (its batches have no labels" in page.words


@pytest.mark.parametrize("finished", [(True, True), (True, False), (False, True)])
def test_the_same_run_twice_counts_once(tmp_path: pathlib.Path, finished: tuple[bool, bool]) -> None:
    """Where one of the two is finished, it counts."""
    made = [folders(tmp_path / place, {"hyla": [0.6]})[0] for place in "ab"]
    for folder, done in zip(made, finished, strict=True):
        if not done:
            (folder / "result.json").unlink()
    page = written(made, tmp_path / "r.html")
    assert "hyla-0 is the same run as hyla-0 and counts once." in page.words
    assert page.cells("HYLA")[2] == "one seed"


def test_mistakes_are_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]})
    other = fabricate(tmp_path, run_of("linear", task=replace(TASK, length=12)), {"iid": (0.5, 0.1)})
    cases = {
        "report: at least one run folder was wanted but none came": [],
        "nowhere is not a run folder": [tmp_path / "nowhere"],
        "report: runs of one task were wanted but length is 8 in softmax-0 and 12 in linear-0": [*made, other],
    }
    for text, given in cases.items():
        with refusing(text):
            report.write(given, tmp_path / "r.html", progress=False)
    monkeypatch.setattr(report.runs, "baselines", None)  # the others are noticed before the work
    page, file = tmp_path / "r.html", tmp_path / "file"
    file.write_text("")
    for write in (
        lambda: report.write(made, file / "r.html", progress=False),
        lambda: report.write(made, page, static=file, progress=False),
        lambda: report.export(made, file, progress=False),
    ):
        with refusing("cannot be written ("):
            write()
    with refusing("export: unknown format 'gif' (choose from png, svg, pdf)"):
        report.export(made, tmp_path, formats=("gif",))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refusing("figures needs matplotlib: pip install 'polyhead[report]'"):
        report.write(made, page, static=tmp_path / "files", progress=False)
    assert not page.exists()
    assert not (tmp_path / "files").exists()


# ---------------------------------------------------------------------------------------------------------------- page
@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_whose_name_is_not_utf_8_is_reported(tmp_path: pathlib.Path) -> None:
    (made,) = folders(tmp_path, {"softmax": [0.5]})
    made = made.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert "caf\\udce9: seed 0" in written([made], tmp_path / "r.html").words


def test_one_file_that_asks_for_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = folders(tmp_path, {"softmax": [0.7]})
    text = written(made, tmp_path / "r.html", title="<b>A & B</b>").content
    assert capsys.readouterr() == ("", "")
    assert text.count("* plotly.js v") == 1
    outside = text[: text.index("<script")]
    assert set(re.findall(r'(?:src|href)="([^"#]+)', outside)) == {"data:,"}
    assert "default-src 'none'" in outside
    assert "&lt;b&gt;A &amp; B&lt;/b&gt;" in outside
    assert "<b>A" not in outside
    assert "polyhead train softmax &lt;fast&gt;" in outside
    assert plain(outside).count('"kind": "FuzzyLogic"') == 1
    assert ph.digest(run_of("softmax")) in outside
    path = report.write(made, tmp_path / "r.html")
    printed = capsys.readouterr()
    assert (printed.out, f"report: {path} (" in printed.err) == ("", True)
