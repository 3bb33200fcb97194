"""The progress output of a training: first its description, then its state, in one line of any width."""

import pytest

from polyhead.train import progress
from polyhead.train.progress import Progress

ROW = {"loss": 0.25, "accuracy": 0.5, "steps_per_second": 2.0, "tokens_per_second": 12345.6}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_the_run_and_its_scores_are_lines(tmp_path, capsys, clock):
    shown = Progress("mine", "accuracy", start=0, steps=1200)
    shown.begin(tmp_path / "mine-new", 1000)
    assert capsys.readouterr().err == f"mine: 1,000 parameters, 1,200 steps, {tmp_path}/mine-new\n"
    for split in ("iid", "novel"):
        shown.evaluated({"split": split, "accuracy": 0.125})
    shown.step()
    assert capsys.readouterr().err == "mine: step 0: accuracy iid 0.125, novel 0.125\n"
    clock[0] += 40.0  # of which half a minute was an evaluation's
    shown.trained({**ROW, "step": 1})
    said = "loss 0.2500, accuracy 0.500, tokens/s 12,346, 2.0 steps/s, 13:19:20 left\n"
    assert capsys.readouterr().err == f"mine: step 1/1200, {said}"
    shown.close()
    again = Progress("other", "accuracy", start=300, steps=1200)
    again.begin(tmp_path / "other", 5)
    assert capsys.readouterr().err == f"other: 5 parameters, 1,200 steps from step 300, {tmp_path}/other\n"
    silent = Progress("mine", "accuracy", start=0, steps=9, enabled=False)
    silent.begin(tmp_path, 5)
    silent.close()
    assert capsys.readouterr().err == ""
