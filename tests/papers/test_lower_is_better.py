"""For bits per byte, lower is better wherever scores are ranked.  Where higher is better: tests/pages."""

import pathlib

import pytest
import torch

import polyhead as ph
from polyhead.analysis.ablate import zero_heads
from polyhead.pages.report.results import Results, title, verdict_table
from polyhead.pages.report.runs import Entry, SeedGroup
from polyhead.tasks import Text
from polyhead.tasks.task import Score
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
        SeedGroup(name, tuple(entry(name, seed, score) for seed, score in enumerate(scores)))
        for name, scores in SCORES.items()
    ]


def test_a_report_ranks_the_best_first_and_judges_it_against_the_best_baseline(groups):
    baselines = {"zlib": {"iid": Score(1.8, 0.01, 9)}, "unigram": {"iid": Score(4.6, 0.01, 9)}}
    results = Results(groups, ["iid"], baselines, [])
    assert [group.label for group in results.ranked()] == ["HYLA", "Softmax", "Linear"]
    assert title(results).startswith("Best on fresh data: HYLA")
    _, rows = verdict_table(results)
    assert [(row[0], row[2]) for row in rows[:3]] == [
        ("HYLA over Softmax", "0.500"),
        ("HYLA over Linear", "1.500"),
        ("HYLA over Zlib", "0.250"),
    ]


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
