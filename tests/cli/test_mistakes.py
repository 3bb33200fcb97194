"""Every invalid input is refused with exit code 2: a value in one line, an option in a box with suggestions."""

import pathlib
import re

import pytest
from commands import mistake, small

import polyhead as ph
from polyhead.cli.dispatch import main
from polyhead.config import save
from polyhead.papers import recipes

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "small" / "lm-bytes"

VALUES = {
    "train fuzzy-hila": "polyhead train: unknown recipe 'fuzzy-hila'; did you mean 'fuzzy-hyla'? (choose from",
    "train fuzzy-hyla --seed 1180591620717411303424": "Run: seed",
    "train fuzzy-hyla --seed -1180591620717411303424": "Run: seed",
    "train fuzzy-hyla --name ../../x": "Run: name must",
    "train fuzzy-hyla --model.heads.0.dim None --model.dim 30": "do not divide",
    "train fuzzy-hyla --model.heads softmax:,hyla:4": "softmax:: the number of heads must be an integer, got ''",
    "train fuzzy-hyla --model.heads hyla:²": "hyla:²: the number of heads must be an integer, got '²'",
    "train games --print": "polyhead train: --print is for one run but games has",
    "train games.yaml": "runs but a file is one",
    "train empty": "polyhead train: the recipe empty has no runs",
    "train hula.yaml": "hula.yaml: unknown mechanism 'hula'; did you mean 'hyla'",
    "train a.yaml": "b.yaml: its recipe leads back to a.yaml: a.yaml -> b.yaml -> a.yaml",
    "generate RUN --prompt a --seed 1180591620717411303424": "generate: --seed must be from",
    "reproduce fig-2c --seeds 1180591620717411303424": "reproduce: seeds must be from 1 to 4096",
    "demo --seeds 0": "demo: --seeds must be at least 1 but is 0",
    "resume file": "run folder: file is no folder",
    "eval RUN --batches 0": "eval: batches must be at least 1 but is 0",
    "eval RUN --checkpoint 3": "has none of '3', but ",
    "report RUN/..": "holds no config.json, so it is not a run",
    "list mechanism": "polyhead list: unknown kind 'mechanism'; did you mean 'mechanisms'?",
    "list runs nowhere": "list runs: nowhere does not exist",
    "sweep small --scale small": "--scale is for the recipes of figures and fuzzy-softmax,",
    "sweep fig-2c --scale": "--scale: expected one argument",
    "sweep small --ray local --slurm": "give --ray or --slurm, not both",
    "sweep small --gpus 1": "--gpus is for --ray and --slurm",
    "train small --workers 2": "--workers is for several runs but there is 1",
    "sweep small --devices 2": "--devices is for one run: polyhead train",
    "reproduce lm-bytes --from RESULTS --seeds 5": "--from trains nothing, so --seeds has no effect",
    "train fuzzy-hyla --folder file": "run folder: file/config.json cannot be written (File exists)",
}
"""A command -> a part of its one line.  RUN is a trained run."""

OPTIONS = {
    "trian fuzzy-hyla": "trian",
    "train": "RECIPE",
    "resume": "RUN",
    "train fuzzy-hyla --model.dm 3": "--model.dim",
    "train fuzzy-hyla --train.lr fast": "--train.lr",
    "train fuzzy-hyla --train.betas 0.9": "--train.betas",
}
"""A command -> a part of the box about it."""

FILES = {
    "games": "recipe: games",
    "hula": "recipe: fuzzy-hyla\nmodel: {heads: 'hula:4'}",
    "a": "recipe: b.yaml",
    "b": "recipe: a.yaml",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return ph.train.run(small(folder=str(tmp_path_factory.mktemp("runs"))), progress=False).folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the files above and an empty file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "RECIPES", recipes.RECIPES | {"small": small, "empty": list})
    for name, text in FILES.items():
        pathlib.Path(f"{name}.yaml").write_text(text + "\n")
    pathlib.Path("file").touch()
    return tmp_path


@pytest.mark.parametrize("command", VALUES)
def test_a_wrong_value_is_one_line(trained, here, capsys, command):
    assert VALUES[command] in mistake(capsys, command.replace("RUN", str(trained)).replace("RESULTS", str(RESULTS)))
    assert not list(here.rglob("*.json*")), "no run was begun"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", OPTIONS)
def test_a_wrong_option_is_explained_in_a_box(capsys, command):
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert OPTIONS[command] in err


def test_a_full_disk_before_the_first_step_is_one_line_and_exit_1(tmp_path, capsys):
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder=str(folder)), path)
    folder.mkdir()
    (folder / "config.json.partial").mkdir()
    assert main(["train", str(path)]) == 1
    assert re.fullmatch(r"polyhead: \S+config.json: cannot be written \(.+\)\n", capsys.readouterr().err)
