"""The tutorials, run from top to bottom: their asserts hold, they print the expected lines, and the first one draws."""

import pathlib
import re
import runpy

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_tutorial(monkeypatch, capsys):
    import matplotlib.pyplot as plt

    monkeypatch.setattr("matplotlib.rcParams", {**plt.rcParams})
    plt.switch_backend("agg")
    plt.close("all")
    made = runpy.run_path(str(DOCS / "tutorial.py"))
    assert "(4, 576)" in capsys.readouterr().out  # correspondences of four features
    assert len(made["losses"]) == 60
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")
    assert len(drawn) == 6
    assert all(axes.images or axes.texts for figure in drawn for axes in figure.axes)


@pytest.mark.usefixtures("quick_jax")
def test_the_tutorial_in_jax(capsys):
    for module, extra in (("jax", "jax"), ("flax", "flax"), ("haiku", "test")):
        pytest.importorskip(module, reason=f"{module} is not installed (extra `{extra}`)")
    runpy.run_path(str(DOCS / "tutorial_jax.py"))
    assert "Out (2, 12, 64) Attention (2, 8, 12, 12)" in capsys.readouterr().out


def test_the_first_needs_no_jax():
    imported = re.findall(r"^(?:import|from) (\w+)", (DOCS / "tutorial.py").read_text(), re.M)
    assert set(imported) == {"math", "matplotlib", "numpy", "torch", "polyhead"}


def test_the_site_runs_them():
    assert "-D percent_execute=1" in (DOCS.parent / "Makefile").read_text()
    assert "\ntutorial\ntutorial_jax\n" in (DOCS / "index.md").read_text()
