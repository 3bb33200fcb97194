"""Where a command writes: a place that cannot be written is one line before the work.  A user may have no home."""

import pathlib
from unittest import mock

import pytest
from commands import mistake

import polyhead as ph
from polyhead import cli
from polyhead.cli.train import configure
from polyhead.ops.native import library
from polyhead.scale.sweep.jobs import prepare
from polyhead.spec.home import located
from polyhead.train import shipped
from polyhead.train.store import files


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a folder and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


def test_new_runs_need_a_folder_that_can_be_written(here, capsys, monkeypatch):
    """Finished ones do not."""
    monkeypatch.setattr(files.tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(13, "Permission denied")))
    line = mistake(capsys, "train lm-bytes --scale smoke --folder folder")
    assert line.startswith("sweep: folder")
    assert line.endswith("cannot be written (Permission denied)")
    (run,), _ = configure("train", "fuzzy-hyla", [[]])
    (here / "folder" / f"{run.name}-{ph.digest(run)}").mkdir()
    assert prepare("sweep", [run], "folder") == [pathlib.Path("folder", f"{run.name}-{ph.digest(run)}")]


@pytest.mark.parametrize(
    "command",
    [
        "train fuzzy-hyla --folder s3://bucket/run",
        "sweep fuzzy-hyla --folder gs://bucket/run",
        "report fuzzy-hyla --out memory://page.html",
    ],
)
def test_a_url_is_no_folder_of_this_machine(here, capsys, command):
    assert "a path of this machine, got the URL" in mistake(capsys, command)
    assert sorted(path.name for path in here.iterdir()) == ["file", "folder"]


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME and without an entry, as in many containers."""
    pwd = pytest.importorskip("pwd")
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("getpwuid(): uid not found")))
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "POLYHEAD_NATIVE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError):
        pathlib.Path.home()


def test_lists_need_no_home(homeless, capsys):
    assert cli.main(["list", "implementations", "--json"]) == 0
    printed = capsys.readouterr().out
    if library.enabled():
        assert "this user has no home folder (set HOME or POLYHEAD_NATIVE_CACHE)" in printed
    assert cli.main(["list", "models"]) == 0


def test_a_model_that_is_here_needs_no_home_and_another_says_so(homeless, monkeypatch, tmp_path):
    assert ph.load("fuzzy-hyla-1")[0].seed == 1
    monkeypatch.setattr(shipped, "REPOSITORY", tmp_path)
    with pytest.raises(ValueError, match=r"load: .*this user has no home folder \(set HOME or XDG_CACHE_HOME\)"):
        ph.load("fuzzy-hyla-1")


def test_a_folder_in_no_home_is_refused_and_not_made(homeless, here):
    for folder in ("~", "~/data"):
        with pytest.raises(ValueError, match=rf"^folder {folder}: this user has no home folder \(set HOME\)$"):
            located(folder)
    assert located("~data") == str(here / "~data")
