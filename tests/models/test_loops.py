"""The loops of other libraries in examples/loops train our models."""

import runpy

import pytest
from scripts import ROOT


@pytest.mark.filterwarnings("ignore")  # those of the libraries
def test_a_model_learns(monkeypatch):
    library = pytest.importorskip("accelerate")
    for state in ("AcceleratorState", "PartialState", "GradientState"):  # that of the process, maybe of another test
        monkeypatch.setattr(getattr(library.state, state), "_shared_state", {})
    losses = runpy.run_path(str(ROOT / "examples" / "loops" / "with_accelerate.py"))["main"](25)
    assert losses[0] > 1.9
    assert sum(losses[-3:]) / 3 < 1.65
