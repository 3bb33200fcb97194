"""For bits per byte, lower is better wherever scores are ranked, also beside a task where higher is better."""

import pathlib

import pytest
import torch

import polyhead as ph
from polyhead.analysis.ablate import zero_heads
from polyhead.cli import text as cli_text
from polyhead.pages.report import figures as report_figures, headline as report_text
from polyhead.pages.report.runs import Entry, Group, summary
from polyhead.papers.study import Point, Setting, select
from polyhead.tasks import FuzzyLogic, Text
from polyhead.train.store.folder import Result

TASKS = {"lower": Text(), "higher": FuzzyLogic()}
SCORES = {"HYLA": (1.5, 1.6), "Softmax": (2.0, 2.1), "Linear": (3.0, 3.1)}  # of two seeds


def run_of(task, name="run", *, seed=0, lr=1e-3):
    model = ph.TransformerConfig(*task.ends, causal=True)
    return ph.Run(task=task, model=model, name=name, seed=seed, train=ph.Train(lr=lr))


def result_of(run, score):
    by_split = {split: {run.task.metric: score, f"{run.task.metric}_se": 0.01} for split in ("iid", "validation")}
    return Result(run.name, ph.digest(run), 100, 1.0, 10, by_split, "", {}, pathlib.Path("run"))


def groups(task):
    found = []
    for name, values in SCORES.items():
        runs = [run_of(task, name, seed=seed) for seed in range(len(values))]
        metric = task.metric
        rows = tuple({"kind": "eval", "step": s, "split": "iid", metric: 8.0 / s} for s in (1, 2, 4))
        entries = [
            Entry(pathlib.Path("run"), run, rows, result_of(run, value), ())
            for run, value in zip(runs, values, strict=True)
        ]
        found.append(Group(name, name.lower(), tuple(entries)))
    return found


def floors(**values):
    return {name: {"iid": summary([value], 0.01)} for name, value in values.items()}


@pytest.mark.parametrize(("better", "order"), [("lower", ["HYLA", "Softmax", "Linear"]), ("higher", None)])
def test_a_report_ranks_the_best_first(better, order):
    found = groups(TASKS[better])
    order = order or ["Linear", "Softmax", "HYLA"]
    assert [group.label for group, _ in report_text.ranked(found)] == order
    assert report_text.title(found).startswith(f"{order[0]} beats {order[1]} and {order[2]} on fresh data")
    told = " ".join(report_text.verdict(found, {}))
    assert f"{order[0]} beats {order[1]} by {'0.500' if better == 'lower' else '1.000'} (Welch" in told
    assert "falls by" not in told  # from fresh data to fresh data
    figure = report_figures.results(found, floors(one=1.0, two=4.0))
    rows = list(figure.layout.yaxis.categoryarray)  # the last is on top
    assert rows[::-1] == [*order, *(("One", "Two") if better == "lower" else ("Two", "One"))]


def test_the_floor_to_beat_is_the_best_one():
    lower = report_text.verdict(groups(TASKS["lower"]), floors(zlib=1.8, unigram=4.6))
    assert "Without any network Zlib comes to 1.800: HYLA is below it; Softmax and Linear are above it." in lower
    higher = report_text.verdict(groups(TASKS["higher"]), floors(ridge=1.8, chance=0.1))
    told = "Ridge regression) scores 1.800: Linear and Softmax are above it; HYLA is below it."
    assert any(line.endswith(told) for line in higher)


def test_a_curve_is_shown_whole():
    figure = report_figures.scores(groups(TASKS["lower"]), "iid", floors(zlib=1.8))
    low, high = figure.layout.yaxis.range
    assert low < 1.8 < 8.0 < high


@pytest.mark.parametrize(("better", "wanted"), [("lower", 3e-3), ("higher", 1e-3)])
def test_a_study_selects_the_best_setting(better, wanted):
    by_setting = {}
    for lr, score in ((1e-3, 2.0), (3e-3, 1.5), (1e-2, float("nan"))):
        run = run_of(TASKS[better], lr=lr)
        by_setting[Setting(lr, 0.1, 100)] = [Point(run, result_of(run, score))]
    assert select(by_setting).setting.lr == wanted


def test_a_head_that_is_zeroed_costs_what_it_was_worth(tmp_path):
    """`drop` is positive where the score gets worse."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    task = Text(str(tmp_path / "text.txt"), length=8, folder=str(tmp_path / "tokens"))
    torch.manual_seed(0)
    model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=ph.Softmax(2), causal=True))
    rows = zero_heads(model, task, "iid", sequences=8)
    assert any(row["drop"] != 0 for row in rows)
    for row in rows:
        assert row["drop"] == pytest.approx(row["score"] - rows[0]["score"], abs=1e-9)


def test_the_command_line_says_so(capsys):
    for task, said in ((TASKS["lower"], True), (TASKS["higher"], False)):
        scores = {task.metric: 1.0, f"{task.metric}_se": 0.1}
        cli_text.scores(run_of(task), {"run": {"iid": scores}}, floors=False)
        assert ("lower is better" in " ".join(capsys.readouterr().out.split())) is said
