"""The report on run folders made by hand: every number is known beforehand."""

import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest
from refusals import refusing
from reported import TASK, fabricate, folders, run_of, small, written

import polyhead as ph
from polyhead.analysis import canvas
from polyhead.analysis.claims import Estimate
from polyhead.pages.report import results, runs, writer as report
from polyhead.pages.report.section import Draft
from polyhead.tasks import RelationalGames
from polyhead.train.stop import DIVERGED


@pytest.fixture(autouse=True)
def _small(monkeypatch, request):
    """Drawing takes most of the time: only tests that look at a figure, with the fixture `drawn`, have any."""
    small(monkeypatch)
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(canvas, "svg", lambda figure, name: "<svg ></svg>")


@pytest.fixture
def drawn():
    """The figures of a page are drawn."""


# ------------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.7, 0.72, 0.77], ["0.730 ± 0.021", "0.900 ± 0.000", "3", "1,234", "61"]),
        ([0.7], ["0.700 ± 0.022", "0.900 ± 0.011", "1", "1,234", "60"]),  # over its test sequences
        ([math.nan], ["–", "0.900 ± 0.011", "0 of 1", "1,234", "60"]),
    ],
)
def test_a_row_has_the_means_and_errors_over_networks(tmp_path, values, cells):
    page = written(folders(tmp_path, {"softmax": values, "hyla": [0.5]}), tmp_path / "r.html")
    assert page.cells("Softmax") == cells
    assert ("softmax-0: r2 on compositional is not finite" in page.words) == math.isnan(values[0])


def test_baselines_and_the_ceiling_are_rows(tmp_path, drawn):
    page = written(folders(tmp_path, {"softmax": [0.7, 0.71]}), tmp_path / "r.html")
    scores = TASK.baselines("compositional", sequences=300)
    for name, label in {"ridge": "Ridge regression (baseline)", "ceiling": "Exact ceiling"}.items():
        cell = f"{scores[name].mean:.3f} ± {scores[name].standard_error:.3f}".replace("-", "−")
        assert page.cells(label)[0] == cell
    assert "Ridge regression</text>" in page.figure("results")


@pytest.mark.parametrize(
    ("softmax", "verdict"),
    [
        ([0.5, 0.51, 0.49, 0.5, 0.52], "yes"),
        ([0.9, 0.9, 0.9, 0.9, 0.9001], "no difference"),
        ([0.5, 0.51, 0.49], "undecided"),
        ([0.5, 0.51, 0.49, 0.5, 0.52, math.nan], "undecided"),  # a diverged network is not left out
    ],
)
def test_the_best_is_judged_against_each_rival(tmp_path, softmax, verdict):
    hyla = [0.9, 0.9002, 0.9, 0.9, 0.9, 0.9][: len(softmax)]
    page = written(folders(tmp_path, {"softmax": softmax, "hyla": hyla}), tmp_path / "r.html")
    assert "Best on unseen combinations: HYLA (R² 0.90)" in page.words
    assert page.cells("HYLA over Softmax")[0] == verdict
    assert page.cells("HYLA over Softmax")[-1] == str(len(softmax))


def test_a_run_that_diverged_leaves_its_comparisons_undecided(tmp_path):
    paths = folders(tmp_path, {"softmax": [0.5, 0.51, 0.49, 0.5, 0.52], "hyla": [0.9] * 5})
    paths.append(fabricate(tmp_path, run_of("hyla", 5), None))
    page = written(paths, tmp_path / "r.html")
    assert page.cells("HYLA over Softmax")[0] == "yes"
    (paths[-1] / "failure.txt").write_text(f"train: the loss is nan at step 60; {DIVERGED}\n")
    page = written(paths, tmp_path / "r.html")
    assert page.cells("HYLA over Softmax")[0] == "undecided"
    assert page.cells("HYLA")[2] == "5 of 6"
    assert "hyla-5 diverged (60 of 100 steps)" in page.words


def test_the_error_of_test_data_that_all_networks_share_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(type(TASK), "shared", lambda self, split: True)
    page = written(folders(tmp_path, {"softmax": [0.5] * 5}), tmp_path / "r.html")
    assert page.cells("Softmax")[:2] == ["0.500 ± 0.022", "0.900 ± 0.011"]


def test_runs_that_differ_in_their_division_alone_are_networks_of_one_row(tmp_path):
    paths = []
    for split, r2 in enumerate((0.6, 0.8)):
        run = run_of("hyla", 0, replace(TASK, split_seed=split))
        paths.append(fabricate(tmp_path / str(split), run, {"compositional": (r2, 0.02)}))
    page = written(paths, tmp_path / "r.html")
    assert page.cells("HYLA")[0] == "0.700 ± 0.100"
    assert "split_seed 0 and 1" in page.words


def test_a_best_that_the_scores_chose_has_a_two_sided_p():
    difference = {"a over b": Estimate.of(dict(enumerate((0.1, 0.01, 0.05, 0.12, 0.0))))}
    (one,), (two,) = results.comparison_rows(difference), results.comparison_rows(difference, ["a over b"])
    assert (one[1], one[4], two[1], two[4]) == ("yes", "0.039", "undecided", "0.078")
    assert (one[3][-6:], two[3][-6:]) == ("(90 %)", "(95 %)")


def test_where_lower_is_better_the_lowest_is_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(type(TASK), "better", "lower")
    page = written(folders(tmp_path, {"softmax": [0.9, 0.91], "hyla": [0.5, 0.51]}), tmp_path / "r.html")
    assert "Best on unseen combinations: HYLA (R² 0.5" in page.words
    assert page.cells("HYLA over Softmax")[1] == "0.400"
    scores = TASK.baselines("compositional", sequences=300)
    lowest = min(set(scores) - {"ceiling"}, key=lambda name: scores[name].mean)
    expected = f"{scores[lowest].mean - 0.505:.3f}".replace("-", "−")
    assert page.cells(f"HYLA over {results.baseline_label(TASK, lowest)}")[1] == expected


def test_unfinished_runs_have_curves_and_a_note(tmp_path, drawn):
    unfinished = fabricate(tmp_path, run_of("hyla"), None)
    page = written([*folders(tmp_path, {"softmax": [0.7]}), unfinished], tmp_path / "r.html")
    assert "hyla-0 is unfinished (60 of 100 steps): its curves alone are shown." in page.words
    assert "HYLA</text>" in page.figure("curves-loss")
    assert "HYLA (n" not in page.figure("results")
    page_of_unfinished = written([unfinished], tmp_path / "r.html")
    assert "No finished run with a score on unseen combinations yet" in page_of_unfinished.words
    assert f"polyhead resume {unfinished}" in page_of_unfinished.words


def test_labels_name_heads_and_what_tells_equal_heads_apart(tmp_path):
    mixed = (ph.Softmax(2), ph.Linear(2))
    run_folders = [
        fabricate(tmp_path, run_of("hyla"), None),
        fabricate(tmp_path, run_of("hyla", seed=1, lr=3e-3), None),
        fabricate(tmp_path, run_of("linear", heads=mixed), None),
    ]
    groups = runs.groups(runs.read(run_folders))
    labels = [group.label for group in groups]
    assert labels == ["HYLA · lr=0.001", "HYLA · lr=0.003", "Softmax 2 + Linear 2"]
    encoder = replace(run_of("hyla").model, encoder=None)
    encoder_decoder = replace(encoder, heads=(ph.Softmax(4),), encoder=encoder)
    assert runs.mechanism(encoder_decoder) == "HYLA, decoder Softmax"
    assert runs.different_settings(groups) == [["train.lr", "0.001", "0.003", "0.001"]]
    wide = runs.groups(
        runs.read([run_folders[0], fabricate(tmp_path, run_of("softmax", heads=(ph.Softmax(4, 8),)), None)])
    )
    assert runs.different_settings(wide) == [["model.heads.0.dim", "None", "8"]]


def test_splits_have_the_names_of_the_task_and_the_most_telling_one_is_the_headline(tmp_path):
    task = RelationalGames(examples=20)
    run = ph.Run(name="games", task=task, model=ph.TransformerConfig(*task.ends, dim=8, heads=(ph.Softmax(2),)))
    scores = {"iid": (0.9, 0.01), "novel_hexominoes": (0.6, 0.01), "novel_stripes": (0.7, 0.01)}
    folder = fabricate(tmp_path, run, scores)
    names = ["unseen shapes (hexominoes)", "unseen shapes (stripes)", "fresh data"]
    words = written([folder], tmp_path / "r.html").words
    assert " ".join(names) in words
    assert "Best on unseen shapes (hexominoes): Softmax (accuracy 0.60)" in words
    assert runs.in_order(["train", "own", "novel_x", "iid", "novel"]) == ["novel_x", "novel", "own", "iid", "train"]


def test_settings_that_differ_beside_the_heads_are_named(tmp_path):
    two_settings = (run_of("hyla"), run_of("softmax", lr=3e-3))
    run_folders = [fabricate(tmp_path, run, {"iid": (0.5, 0.1)}) for run in two_settings]
    page = written(run_folders, tmp_path / "r.html")
    assert page.cells("train.lr") == ["0.001", "0.003"]


# ------------------------------------------------------------------------------------------------------- damaged, odd
def test_torn_rows_and_missing_checkpoints_are_noted(tmp_path):
    (folder,) = folders(tmp_path, {"softmax": [0.7]})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    page = written([folder], tmp_path / "r.html")
    assert "softmax-0: 1 of 6 lines of metrics.jsonl are unreadable." in page.words
    assert "softmax-0: no attention maps (" in page.words
    assert "softmax-0: no code maps and probes (" in page.words


@pytest.mark.parametrize("finished", [(True, True), (True, False), (False, True)])
def test_the_same_run_twice_counts_once(tmp_path, finished):
    run_folders = [folders(tmp_path / parent, {"hyla": [0.6]})[0] for parent in "ab"]
    for folder, is_finished in zip(run_folders, finished, strict=True):
        if not is_finished:
            (folder / "result.json").unlink()
    page = written(run_folders, tmp_path / "r.html")
    assert "hyla-0 is the same run as hyla-0 and counts once." in page.words
    assert page.cells("HYLA")[2] == "1"


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    run_folders = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]})
    other_length = fabricate(tmp_path, run_of("linear", task=replace(TASK, length=12)), {"iid": (0.5, 0.1)})
    page = tmp_path / "r.html"
    file = tmp_path / "file"
    file.write_text("")
    with refusing("report: no run folder was given; name at least one"):
        report.write([], page, progress=False)
    with refusing("nowhere is not a run folder"):
        report.write([tmp_path / "nowhere"], page, progress=False)
    with refusing("report: all runs must be on one task, but length is 8 in softmax-0 and 12 in linear-0"):
        report.write([*run_folders, other_length], page, progress=False)
    with refusing("cannot be written ("):
        report.write(run_folders, file / "r.html", progress=False)
    with refusing("cannot be written ("):
        report.write(run_folders, page, static=file, progress=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refusing("figures needs matplotlib: pip install 'polyhead[report]'"):
        report.write(run_folders, page, progress=False)
    assert not page.exists()


def test_a_score_that_is_no_number_is_refused(tmp_path):
    (folder,) = folders(tmp_path, {"softmax": [0.7]})
    result = json.loads((folder / "result.json").read_text())
    result["scores"]["iid"]["r2"] = "high"
    (folder / "result.json").write_text(json.dumps(result))
    with refusing("result.json: "):
        runs.read([folder])


# ---------------------------------------------------------------------------------------------------------------- page
def test_nothing_of_a_folder_reaches_the_page_or_the_terminal_unescaped(tmp_path, capsys):
    (folder,) = folders(tmp_path, {"softmax": [0.7]})
    hostile = "<script>alert(1)</script>\x1b[31m\u202e"
    folder = folder.rename(tmp_path / os.fsdecode(b"<img src=x onerror=alert(2)> \xe9"))  # not UTF-8
    result = json.loads((folder / "result.json").read_text())
    result |= {"command": hostile, "environment": {hostile: hostile}}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text('{"kind": "<b>", "step": 1}\nnot JSON')
    page = written([folder], tmp_path / "r.html", title=hostile).content
    assert not re.search("<script|<img|\x1b|\u202e", page)
    assert page.count("&lt;script&gt;alert(1)") == 5  # title, kicker, command, environment twice
    Draft(progress=True).tell("codes of \x1b[31m")
    assert capsys.readouterr().err == "report: codes of \\x1b[31m\n"


def test_one_file_without_scripts_that_asks_for_nothing(tmp_path, capsys, drawn):
    run_folders = folders(tmp_path, {"softmax": [0.7]})
    content = written(run_folders, tmp_path / "r.html").content
    assert capsys.readouterr() == ("", "")
    assert "default-src 'none'" in content
    assert "<script" not in content
    assert content.count("href=") == content.count('href="#') + content.count('href="data:')
    report.write(run_folders, tmp_path / "r.html")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"report: {tmp_path / 'r.html'} (" in printed.err
    frame = report.page(run_folders, progress=False)._repr_html_()  # in a notebook
    assert frame.startswith('<iframe srcdoc="')
    assert "<html" not in frame  # its markup is escaped
