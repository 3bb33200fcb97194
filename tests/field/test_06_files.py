"""Work is never lost because a file cannot be opened: only a file with wrong contents counts as damaged."""

import errno
import os
import pathlib

import pytest
from run_folders import names, rows, same
from tiny_runs import interrupted

import polyhead as ph


def unreadable(monkeypatch, number):
    """Make every checkpoint give this error when it is opened."""
    plain = pathlib.Path.read_bytes

    def read_bytes(path):
        if path.suffix == ".safetensors":
            raise OSError(number, os.strerror(number), str(path))
        return plain(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)


def test_a_folder_whose_name_is_not_utf8_resumes(tiny, tmp_path, whole):
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    interrupted(tiny(folder), 8)
    ph.train.run(tiny(folder), progress=False, resume=True)
    same(folder, whole)
    assert not [name for name in names(folder) if "damaged" in name]
    assert ph.load(folder)[0].name == "tiny"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENODEV, errno.EIO])
def test_a_checkpoint_that_cannot_be_opened_is_left_alone(tiny, tmp_path, monkeypatch, number):
    interrupted(tiny(tmp_path), 8)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        unreadable(patch, number)
        for use in (lambda: ph.load(tmp_path), lambda: ph.train.run(tiny(tmp_path), progress=False, resume=True)):
            with pytest.raises(OSError, match=os.strerror(number)) as error:
                use()
            assert "checkpoint" in str(error.value)
    assert {*before} <= {*names(tmp_path)}
    ph.train.run(tiny(tmp_path), progress=False, resume=True)
    assert [row["step"] for row in rows(tmp_path, "train")] == list(range(1, 13))
