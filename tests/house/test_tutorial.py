"""docs/tutorial.py, run from top to bottom: what it asserts holds, it prints what it promises, and it draws."""

import pathlib
import runpy

import pytest

for module, extra in (("jax", "jax"), ("flax", "flax"), ("haiku", "test")):
    pytest.importorskip(module, reason=f"{module} is not installed (extra `{extra}`)")

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def pictures(monkeypatch):
    """The figures that are open, drawn to nowhere."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr("matplotlib.rcParams", {**plt.rcParams})
    plt.switch_backend("agg")
    plt.close("all")
    yield lambda: [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")


@pytest.mark.usefixtures("quick_jax")
def test_the_tutorial(pictures, capsys):
    made = runpy.run_path(str(DOCS / "tutorial.py"))
    said = capsys.readouterr().out
    assert "Out (2, 12, 64) Attention (2, 8, 12, 12)" in said
    assert "(4, 576)" in said  # correspondences of four features
    assert len(made["losses"]) == 60
    drawn = pictures()
    assert len(drawn) == 6
    assert all(axes.images or axes.texts for figure in drawn for axes in figure.axes)


def test_the_site_runs_it():
    assert "-D percent_execute=1" in (DOCS.parent / "Makefile").read_text()
    assert "\ntutorial\n" in (DOCS / "index.md").read_text()
