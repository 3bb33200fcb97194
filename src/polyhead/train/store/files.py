"""Files are written beside their place, flushed to the disk and renamed, so that a file is complete at any moment."""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator


class Damaged(ValueError):
    """The contents of a file differ from what was written.  A file that cannot be opened is no such file."""


def write(path: pathlib.Path, data: bytes) -> None:
    """Replace `path` by `data`: a crash or a full disk leaves the earlier file.  Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with path_in_errors(path):
        # A link of this name in a stranger's folder would lead elsewhere.
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def delete(path: pathlib.Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def path_in_errors(path: pathlib.Path) -> Iterator[None]:
    """A context that adds `path` to the text of an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be written ({error.strerror})") from None


def check_place(caller: str, path: pathlib.Path) -> None:
    """Raise a ValueError, before the work, if the file `path` cannot be written; make its folder."""
    # The path of a URL such as s3://bucket/run would be a folder s3: of this one; C: is a drive.
    if path.parts and re.fullmatch(r"[^/\\]{2,}:", path.parts[0]):
        raise ValueError(f"{caller}: expected a path of this machine, got the URL {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Both trials leave no trace: the file is opened without truncation, and the temporary one vanishes.
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))  # a pipe, too, has no place to seek
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{caller}: {path} cannot be written ({error.strerror})") from None


def check_folder(caller: str, folder: pathlib.Path) -> None:
    """Raise a ValueError, before the work, if nothing can be written into `folder`; make the folder."""
    check_place(caller, folder / "file")
