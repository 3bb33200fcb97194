"""The search of docs/sweeps.md: Optuna's own interface over `ph.train.run`."""

import re

import optuna
import pytest
from scripts import ROOT

import polyhead as ph


@pytest.fixture
def script(monkeypatch, tmp_path, tiny):
    """The block of the page, with two trials of two steps of a small run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ph.recipes.RECIPES, "fuzzy-hyla", lambda: tiny(None))
    page = (ROOT / "docs" / "sweeps.md").read_text()
    (block,) = re.findall(r"```python\n(import dataclasses.*?)```", page, re.DOTALL)
    return block.replace("steps=1000", "steps=2").replace("n_trials=20", "n_trials=2")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_search_of_the_page_trains_its_trials_and_continues_its_study(script):
    exec(script, {})
    exec(script, {})
    study = optuna.load_study(study_name="fuzzy", storage="sqlite:///search.db")
    assert len(study.trials) == 4
    scores = {record.folder.name: record.score("validation") for record in ph.records("runs/search")}
    assert scores == {str(trial.number): trial.value for trial in study.trials}
    assert study.best_value == max(scores.values())
