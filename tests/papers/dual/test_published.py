"""`reproduce --published`: figures on files in the published formats."""

import json
from dataclasses import replace

import numpy as np
import pytest

from polyhead.cli import dispatch as cli
from polyhead.config import digest
from polyhead.models.size import parameters
from polyhead.papers.dual.models import DUAL
from polyhead.papers.recipes import STUDIES
from polyhead.papers.redraw import redraw
from polyhead.papers.reproduce import FIGURES, on_published, reproduce
from polyhead.train.checks import check


def few(monkeypatch, figure, keep):
    """Of the smallest runs of `figure` those whose names begin with one of `keep`."""
    known = FIGURES[figure]
    runs = lambda scale: tuple(run for run in known.runs(scale) if run.name.startswith(keep))  # noqa: E731
    monkeypatch.setitem(FIGURES, figure, replace(known, runs=runs))


def write_games(folder):
    for i, shapes in enumerate(("pentos", "hexos", "stripes")):
        images = np.random.default_rng(i).integers(0, 256, (60, 36, 36, 3), dtype=np.uint8)
        np.savez(folder / f"same_{shapes}.npz", images=images, labels=np.arange(60)[:, None] % 2)


def write_maths(folder):
    for part, numbers in {"train-easy": range(100), "interpolate": range(200, 240)}.items():
        (folder / part).mkdir()
        lines = (f"What is the derivative of {n}*x?\n{n}\n" for n in numbers)
        (folder / part / "calculus__differentiate.txt").write_text("".join(lines))


GAMES = ("same-16-dual-0", "same-16-softmax-0", "same-32-dual-0", "same-32-softmax-0")
MATHS = ("maths-calculus__differentiate-dual-0", "maths-calculus__differentiate-softmax-0")


def test_games_on_published_images(trained, tmp_path, monkeypatch, capsys):
    (published := tmp_path / "my files").mkdir()
    write_games(published)
    few(monkeypatch, "games", GAMES)
    asked = ["games", "--scale", "smoke", "--seeds", "1", "--published", str(published), "--folder", str(tmp_path)]
    assert cli.main(["reproduce", *asked, "--device", "cpu"]) == 0
    about = json.loads((tmp_path / "games" / "results.json").read_text())
    assert about["command"] == f"polyhead reproduce games --scale smoke --seeds 1 --published '{published}'"
    assert {row["task"]["data"] for row in about["runs"]} == {"original"}
    assert len({row["fingerprint"] for row in about["runs"]}) == 1
    assert set(about["runs"][0]["scores"]) == {"validation", "iid", "novel_hexominoes", "novel_stripes"}
    redrawn = json.loads((redraw(tmp_path / "games", tmp_path / "again")[0].parent / "results.json").read_text())
    assert redrawn["numbers"] == about["numbers"]


def test_mathematics_on_published_questions(trained, tmp_path, monkeypatch):
    """No module of the figure has a file of larger numbers, and none has one of longer questions."""
    (published := tmp_path / "files").mkdir()
    write_maths(published)
    few(monkeypatch, "maths", MATHS)
    _, found, _ = reproduce("maths", "smoke", folder=tmp_path, device="cpu", published=published, progress=False)
    assert "exact, interpolation" in found.head
    assert not {"exact, more parts", "exact, larger numbers"} & set(found.head)
    assert [verdict.claim for verdict in found.verdicts] == ["Dual attention is better than Softmax at differentiate"]


@pytest.mark.parametrize("scale", ["small", "smoke"])
def test_published_questions_are_longer_than_ours(scale, tmp_path):
    write_maths(tmp_path)
    with (tmp_path / "train-easy" / "calculus__differentiate.txt").open("a") as file:
        file.write(f"{'x' * 160}\n{'1' * 30}\n")
    runs = [run for run in STUDIES["maths"](scale) if "differentiate" in run.name and run.seed == 0]
    there = on_published(runs, tmp_path)
    sizes = [parameters(run.model) for run in there]
    assert max(sizes) < 1.01 * min(sizes)
    for run, other in zip(there, runs, strict=True):
        check(run)  # the model reads all of the task's characters
        assert run.task.batch("train", 4, seed=0, step=0).source.shape == (4, 160)
        assert (DUAL.row_of(run), run.train.steps) == (DUAL.row_of(other), other.train.steps)


def test_runs_on_published_files_are_other_runs_wherever_the_files_are(tmp_path):
    (run, *_) = STUDIES["games"]("smoke")
    (there,) = on_published([run], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (elsewhere,) = on_published([run], tmp_path / "elsewhere")
    assert digest(run) != digest(there) == digest(elsewhere)


@pytest.mark.parametrize(
    ("figure", "folder", "says"),
    [
        ("order", ".", "is for figures of relational games and maths, not of pairwise_order"),
        ("games", "no", "is no folder"),
    ],
)
def test_what_has_no_published_files(figure, folder, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        reproduce(figure, "smoke", folder=tmp_path, published=tmp_path / folder, progress=False)
