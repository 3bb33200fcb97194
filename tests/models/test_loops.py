"""The loops of other libraries in examples/loops train our models."""

import pathlib
import runpy

import pytest

LOOPS = pathlib.Path(__file__).parents[2] / "examples" / "loops"


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize(
    ("name", "needs"),
    [("with_accelerate", "accelerate"), pytest.param("with_fabric", "lightning_fabric", marks=pytest.mark.campaign)],
)
def test_a_model_learns(name, needs, monkeypatch):
    library = pytest.importorskip(needs)
    if needs == "accelerate":  # its state is that of the process, maybe of another precision
        for state in ("AcceleratorState", "PartialState", "GradientState"):
            monkeypatch.setattr(getattr(library.state, state), "_shared_state", {})
    losses = runpy.run_path(str(LOOPS / f"{name}.py"))["main"](25)
    assert losses[0] > 1.9
    assert sum(losses[-3:]) / 3 < 1.65
