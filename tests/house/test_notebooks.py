"""Notebooks: their scripts run from top to bottom, and the committed notebooks have the cells of the scripts."""

import json
import runpy

import matplotlib.pyplot as plt
import pytest
from scripts import ROOT, loaded

DOCS = ROOT / "docs"
make_notebooks = loaded("docs", "make_notebooks.py")
SCRIPTS = make_notebooks.SCRIPTS


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch):
    monkeypatch.setattr("matplotlib.rcParams", {**plt.rcParams})
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_and_draws(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(script))
    figures = [plt.figure(number) for number in plt.get_fignums()]
    assert figures
    for figure in figures:
        assert figure.axes
        assert all(axes.has_data() or axes.texts for axes in figure.axes)


@pytest.mark.usefixtures("quick_jax")
def test_the_tutorial_in_jax_runs():
    runpy.run_path(str(DOCS / "tutorial_jax.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_has_the_cells_of_its_script(script):
    """If this fails: python docs/make_notebooks.py"""
    notebook = json.loads((DOCS / "notebooks" / f"{script.stem}.ipynb").read_text(encoding="utf-8"))
    committed = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert committed == [cell.source for cell in make_notebooks.cells(script)]
