"""Still figures: formats, and that every measured number is drawn where it belongs."""

import pathlib
import sys

import numpy as np
import pytest

from polyhead.analysis import figures


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats_and_repeatability(tmp_path: pathlib.Path, ending: str, start: bytes) -> None:
    files = []
    for name in ("a", "b"):
        path = figures.results(
            {"HYLA": [0.7, 0.8], "Softmax": [0.6]}, tmp_path / f"{name}.{ending}", floors={"GP": 0.78}
        )
        files.append(path.read_bytes())
    assert files[0].startswith(start)
    assert files[0] == files[1]


def test_results_say_mechanisms_seeds_and_floors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure) or path)
    measured = {"Softmax": [0.5], "HYLA": [0.7, 0.8, 0.9], "Linear": [0.1, 0.2]}
    figures.results(measured, tmp_path / "r.svg", floors={"Gaussian process": 0.78}, errors={"Softmax": 0.05})
    axes = drawn[0].axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["Linear (n = 2)", "Softmax (n = 1)", "HYLA (n = 3)"]
    assert [t.get_text() for t in axes.texts] == ["Gaussian process"]
    bars = [container.lines[2][0].get_segments()[0][:, 0] for container in axes.containers]
    wanted = [(0.15, 0.05), (0.5, 0.05), (0.8, 0.1 / 3**0.5)]
    assert [tuple(bar) for bar in bars] == [pytest.approx((m - e, m + e)) for m, e in wanted]
    assert next(line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1) == 0.78


def test_code_maps_draw_every_point_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure) or path)
    points = np.random.default_rng(0).normal(size=(50, 2))
    classes = np.arange(50) % 9
    figures.code_maps([("by target", points, points[:, 0]), ("by term 1", points, classes)], tmp_path / "m.png")
    target, term = (axes for axes in drawn[0].axes if axes.get_title())
    assert [target.get_title(), term.get_title()] == ["by target", "by term 1"]
    assert len(target.collections[0].get_offsets()) == 50
    assert [len(c.get_offsets()) for c in term.collections] == np.bincount(classes).tolist()
    looks = {(tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in term.collections}
    assert len(looks) == 9


def test_mistakes(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"^results: every mechanism needs at least one measured score$"):
        figures.results({"HYLA": []}, tmp_path / "r.png")
    with pytest.raises(ValueError, match=r"^code_maps: at least one panel was wanted but none came$"):
        figures.code_maps([], tmp_path / "r.png")
    with pytest.raises(ValueError, match=r"^figures: .*r\.xyz cannot be written \("):
        figures.results({"HYLA": [0.5]}, tmp_path / "r.xyz")


def test_no_global_state_of_matplotlib(tmp_path: pathlib.Path) -> None:
    figures.results({"HYLA": [0.5]}, tmp_path / "r.png")
    assert "matplotlib.pyplot" not in sys.modules
