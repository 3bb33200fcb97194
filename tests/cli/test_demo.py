"""The demo: its live display, and its estimate of time."""

import io

import pytest
import torch
from rich.console import Console

from polyhead.cli import demo as cli_demo
from polyhead.papers import demo
from polyhead.scale.sweep import board as board_module
from polyhead.scale.sweep.job import Job


@pytest.fixture
def board(tmp_path):
    """HYLA has trained for a while, softmax heads wait."""
    hyla, _ = jobs = [Job(run, tmp_path / run.name) for run in demo.fuzzy()]
    hyla.step, hyla.rate, hyla.handle, hyla.training = 1250, 15.0, object(), True
    hyla.shown = {"loss": "0.0050", "iid r2": "0.600", "compositional r2": "0.500"}
    marks = {"Recall": 0.45, "Mixture": 0.9, "Nearest neighbour": -0.2}
    return board_module.Board(jobs, 2, enabled=True, unseen="compositional", marks=marks)


def test_known_and_unseen_stand_on_one_scale_with_the_floors(board):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(board.drawn())
    first, second, legend, *_ = console.export_text().splitlines()
    assert first.split()[:6] == ["hyla-1", f"1,250/{demo.FUZZY_STEPS:,}", "known", "0.60", "unseen", "0.50"]
    scale = first.split()[-1]
    assert len(scale) == board_module.WIDE
    places = {mark: [i / (board_module.WIDE - 1) for i, other in enumerate(scale) if other == mark] for mark in "○●│"}
    assert places["○"] == pytest.approx([0.6], abs=0.011)
    assert places["●"] == pytest.approx([0.5], abs=0.011)
    assert places["│"] == pytest.approx([0.45, 0.9], abs=0.011)  # a floor below the scale is no mark
    assert second.split()[:4] == ["softmax-1", "waiting", "known", "–"]
    assert "Recall 0.45" in legend
    assert "Mixture 0.90" in legend
    assert "Nearest" not in legend


def test_without_a_terminal_the_words_are_the_boards(board):
    assert board.told(board.jobs[0]).startswith("loss 0.0050  known 0.600  unseen 0.500  15.0 steps/s")


def test_what_lies_beyond_the_scale_is_at_its_end(board):
    scale = board.scale(1.2, -0.3)
    assert (scale[-1], scale[0]) == ("○", "●")
    assert board.scale(float("nan"), -0.3) == board.scale(None, -0.3)


def test_the_estimate_shares_the_runs_among_workers(monkeypatch):
    """Two runs whose steps take 0.06 and 0.03 s, with start and scores: on two cores the longer one counts.  Then short
    ones, of which each core has two."""
    monkeypatch.setattr(cli_demo, "step_seconds", lambda run: 0.06 if run.name.startswith("hyla") else 0.03)
    longer, shorter = (cli_demo.START + demo.FUZZY_STEPS * each * cli_demo.SCORING for each in (0.06, 0.03))
    assert cli_demo.minutes(demo.fuzzy(), 2) == f"{longer / 60:.0f} minutes"
    assert cli_demo.minutes(demo.fuzzy(), 1) == f"{(longer + shorter) / 60:.0f} minutes"
    monkeypatch.setattr(cli_demo, "step_seconds", lambda run: 0.01)
    each = cli_demo.START + demo.race()[0].train.steps * 0.01 * cli_demo.SCORING
    assert cli_demo.minutes(demo.race()[:4], 2) == f"{2 * each:.0f} seconds"


def test_each_part_shows_its_unseen_split():
    for split, runs in zip(cli_demo.UNSEEN, (demo.race(), demo.fuzzy()), strict=True):
        assert all(split in run.train.evaluate for run in runs)


@pytest.mark.parametrize(
    ("capability", "asked", "steps"),
    [("AVX512", None, 12_500), ("AVX2", None, 6500), ("DEFAULT", None, 6500), ("AVX2", 400, 400)],
)
def test_a_slower_processor_has_fewer_steps(capability, asked, steps, monkeypatch, tmp_path, capsys):
    trained = []
    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", lambda runs, *rest, **options: trained.extend(runs) or [])
    monkeypatch.setattr(cli_demo, "step_seconds", lambda run: 0.01)
    monkeypatch.setattr(cli_demo, "marks", lambda *given: {})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cli_demo.Demo(folder=tmp_path, device="cpu", steps=asked)() == 0
    fuzzy = demo.fuzzy()[0].task
    assert {run.train.steps for run in trained if run.task == fuzzy} == {steps}
    assert {run.train.steps for run in trained if run.task != fuzzy} == {600}
    assert f"{steps:,} of\nits 50,000 steps" in capsys.readouterr().err
    assert demo.steps_on(torch.device("cuda")) == 12_500


def test_a_step_is_timed_and_threads_are_put_back():
    before = torch.get_num_threads()
    assert cli_demo.step_seconds(demo.race()[0], steps=1) > 0
    assert torch.get_num_threads() == before


def test_marks_are_the_floors_of_the_unseen_split(monkeypatch):
    run = demo.fuzzy()[0]
    found = run.task.floors("compositional", sequences=50)
    monkeypatch.setattr(type(run.task), "floors", lambda self, split: found if split == "compositional" else {})
    assert cli_demo.marks(run, "compositional") == {
        "Recall": found["recall"].mean,
        "Gaussian process": found["gaussian_process"].mean,
        "Mixture": found["mix"].mean,
        "Exact ceiling": found["ceiling"].mean,
    }
