"""The progress output of a training: first its description, then its state, in one line of any width."""

import io
import sys
import types

import pytest
from rich.console import Console

from polyhead.train import progress
from polyhead.train.progress import Progress

ROW = {"loss": 0.25, "accuracy": 0.5, "steps_per_second": 2.0, "tokens_per_second": 12345.6}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_the_run_and_its_scores_are_lines(tmp_path, capsys, clock):
    display = Progress("mine", "accuracy", start=0, steps=1200)
    display.begin(tmp_path / "mine-new", 1000)
    assert capsys.readouterr().err == f"mine: 1,000 parameters, 1,200 steps, {tmp_path}/mine-new\n"
    for split in ("iid", "novel"):
        display.evaluated({"split": split, "accuracy": 0.125})
    display.step()
    assert capsys.readouterr().err == "mine: step 0: accuracy iid 0.125, novel 0.125\n"
    clock[0] += 40.0  # of which half a minute was an evaluation's
    display.trained({**ROW, "step": 1})
    state = "loss 0.2500, accuracy 0.500, tokens/s 12,346, 2.0 steps/s, 13:19:20 left\n"
    assert capsys.readouterr().err == f"mine: step 1/1200, {state}"
    display.close()
    resumed = Progress("other", "accuracy", start=300, steps=1200)
    resumed.begin(tmp_path / "other", 5)
    assert capsys.readouterr().err == f"other: 5 parameters, 1,200 steps from step 300, {tmp_path}/other\n"
    silent = Progress("mine", "accuracy", start=0, steps=9, enabled=False)
    silent.begin(tmp_path, 5)
    silent.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("width", "has_bar"), [(30, False), (60, False), (120, True)])
def test_the_bar_is_one_line_however_narrow(width, has_bar, tmp_path):
    display = Progress("mine", "accuracy", start=600, steps=12000)
    display.begin(tmp_path, 5, Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width))
    display.trained({**ROW, "step": 600})
    page = Console(file=io.StringIO(), width=width)
    page.print(display.bar.get_renderable())
    display.close()
    line = page.file.getvalue().rstrip()
    assert "\n" not in line
    assert "600/12000 ? left loss" in line
    assert ("━" in line) == has_bar
    assert ("12,346" in line) == has_bar == ("…" not in line)


def test_a_notebook_has_a_bar_where_widgets_are_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert progress.bar_console() is None
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name)
    assert progress.bar_console() is not None
