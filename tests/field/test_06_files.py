"""Work is never lost because a file cannot be opened: only a file with wrong contents counts as damaged."""

import errno
import os
import pathlib

import pytest
from run_folders import names, rows, same
from tiny_runs import interrupted

import polyhead as ph


def unreadable(monkeypatch, name, number):
    """Make every checkpoint give this error when it is opened by the function `name`."""
    plain = open

    def refuse(path, *arguments, **options):
        if str(path).endswith(".safetensors"):
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(name, refuse)


def test_a_folder_whose_name_is_not_utf8_resumes(tiny, tmp_path, uninterrupted):
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    interrupted(tiny(folder), 8)
    ph.train.run(tiny(folder), progress=False, resume=True)
    same(folder, uninterrupted)
    assert not [name for name in names(folder) if "damaged" in name]
    assert ph.load(folder)[0].name == "tiny"


@pytest.mark.parametrize("name", ["builtins.open", "io.open"])  # of its header, of its tensors
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENODEV])
def test_a_checkpoint_that_cannot_be_opened_is_left_alone(tiny, tmp_path, monkeypatch, number, name):
    interrupted(tiny(tmp_path), 8)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        unreadable(patch, name, number)
        for use in (lambda: ph.load(tmp_path), lambda: ph.train.run(tiny(tmp_path), progress=False, resume=True)):
            with pytest.raises(OSError, match=os.strerror(number)) as error:
                use()
            assert "checkpoint" in str(error.value)
    assert {*before} <= {*names(tmp_path)}
    ph.train.run(tiny(tmp_path), progress=False, resume=True)
    assert [row["step"] for row in rows(tmp_path, "train")] == list(range(1, 13))
