"""Texts, a task that reads them, and its files on the disk."""

import contextlib
import random
from unittest import mock

from polyhead.tasks import Text
from polyhead.tasks.text.sources import SPLITS
from polyhead.tasks.text.writer import CorpusWriter


def lines(count, seed):
    words = ["the", "café", "of", "naïve", "model", "日本", "return", "self", "0x7f"]
    dice = random.Random(seed)
    return "".join(" ".join(dice.choices(words, k=dice.randint(1, 9))) + "\n" for _ in range(count))


def task_of(data, tmp_path, cache="cache", **fields):
    return Text(str(data), folder=str(tmp_path / cache), length=16, **fields)


def place_of(tmp_path, cache="cache"):
    (found,) = (path for path in (tmp_path / cache).iterdir() if path.is_dir())
    return found


def contents(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "lock"}


def texts(task):
    """The documents of each split, as they are read back."""
    corpus = task._corpus()
    found = {}
    for split in SPLITS:
        row = corpus.tokens[split].tobytes()
        assert (row[0], row[-1]) == (0, 0)
        found[split] = row[1:-1].split(b"\0")
    return found


def everything(found):
    return [text for split in SPLITS for text in found[split]]


class Killed(BaseException):
    """No clause catches it."""


@contextlib.contextmanager
def killed_at(pieces=0):
    """As if the process was killed right after it wrote more than this number of pieces to the disk."""
    commit = CorpusWriter.commit

    def commit_and_die(writer):
        commit(writer)
        if writer.pieces > pieces:
            raise Killed

    with mock.patch.object(CorpusWriter, "commit", commit_and_die), contextlib.suppress(Killed):
        yield
