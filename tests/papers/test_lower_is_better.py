"""For bits per byte, lower is better wherever scores are ranked.  Where higher is better: tests/pages."""

import pathlib

import pytest
import torch

import polyhead as ph
from polyhead.analysis.ablate import zero_heads
from polyhead.pages.report import figures as report_figures, headline as report_text
from polyhead.pages.report.runs import Entry, SeedGroup, summary
from polyhead.tasks import Text
from polyhead.train.store.folder import Result

TEXT = Text()
SCORES = {"HYLA": (1.5, 1.6), "Softmax": (2.0, 2.1), "Linear": (3.0, 3.1)}  # of two seeds


def entry(name, seed, score):
    model, metric = ph.TransformerConfig(*TEXT.ends, causal=True), TEXT.metric
    run = ph.Run(task=TEXT, model=model, name=name, seed=seed)
    rows = tuple({"kind": "eval", "step": s, "split": "iid", metric: 8.0 / s} for s in (1, 2, 4))
    by_split = {split: {metric: score, f"{metric}_se": 0.01} for split in ("iid", "validation")}
    result = Result(name, ph.digest(run), 100, 1.0, 10, by_split, "", {}, pathlib.Path("run"))
    return Entry(pathlib.Path("run"), run, rows, result, ())


@pytest.fixture
def groups():
    return [
        SeedGroup(name, name.lower(), tuple(entry(name, seed, score) for seed, score in enumerate(scores)))
        for name, scores in SCORES.items()
    ]


def floors(**values):
    return {name: {"iid": summary([value], 0.01)} for name, value in values.items()}


def test_a_report_ranks_the_best_first(groups):
    assert [group.label for group, _ in report_text.ranked(groups)] == ["HYLA", "Softmax", "Linear"]
    assert report_text.title(groups).startswith("HYLA beats Softmax and Linear on fresh data")
    told = " ".join(report_text.verdict(groups, {}))
    assert "HYLA beats Softmax by 0.500 (Welch" in told
    assert "falls by" not in told  # from fresh data to fresh data
    figure = report_figures.results(groups, floors(one=1.0, two=4.0))
    rows = list(figure.layout.yaxis.categoryarray)  # the last is on top
    assert rows[::-1] == ["HYLA", "Softmax", "Linear", "One", "Two"]


def test_the_floor_to_beat_is_the_best_one(groups):
    lower = report_text.verdict(groups, floors(zlib=1.8, unigram=4.6))
    assert "Without any network Zlib comes to 1.800: HYLA is below it; Softmax and Linear are above it." in lower


def test_a_curve_is_shown_whole(groups):
    figure = report_figures.scores(groups, "iid", floors(zlib=1.8))
    low, high = figure.layout.yaxis.range
    assert low < 1.8 < 8.0 < high


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
