"""What a command prints beside its result."""

import warnings

from polyhead.cli.output import short_warnings
from polyhead.cli.train import train
from polyhead.config import BlindToOrder
from polyhead.papers.recipes import RECIPES
from polyhead.train import Result


def test_a_warning_of_ours_is_one_line():
    plain = warnings.formatwarning
    with short_warnings():
        assert warnings.formatwarning("Transformer: x", BlindToOrder, "f.py", 3) == "polyhead: Transformer: x\n"
        assert warnings.formatwarning("y", UserWarning, "f.py", 3) == plain("y", UserWarning, "f.py", 3)
    assert warnings.formatwarning is plain


def test_runs_of_two_tasks_are_scored_each_by_its_own_metric(monkeypatch, capsys, tmp_path):
    """As those of `polyhead train demo`."""
    made = RECIPES["demo"]()
    runs = [made[0], made[-1]]

    def finished(run):
        scores = {"iid": {"loss": 0.1, run.task.metric: 0.5, f"{run.task.metric}_se": 0.125}}
        return Result(run.name, "", 1, 1.0, 1, scores, "", {}, tmp_path)

    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", lambda runs, *_, **__: [finished(run) for run in runs])
    assert train(runs) == 0
    said = " ".join(capsys.readouterr().out.split())
    for run in runs:
        assert f"{run.task.metric} (mean" in said
        assert f"on {run.task.name}" in said
    assert said.count("0.500 ± 0.125") == 2
