"""Texts, a task that reads them, and its files on the disk."""

import random

from polyhead.tasks import Text
from polyhead.tasks.text.sources import SPLITS


def lines(count, seed):
    words = ["the", "café", "of", "naïve", "model", "日本", "return", "self", "0x7f"]
    dice = random.Random(seed)
    return "".join(" ".join(dice.choices(words, k=dice.randint(1, 9))) + "\n" for _ in range(count))


def task_of(data, tmp_path, cache="cache", **fields):
    return Text(str(data), folder=str(tmp_path / cache), length=16, **fields)


def documents(task):
    """The documents of each split, as they are read back."""
    by_split = {}
    for split in SPLITS:
        row = task._corpus.tokens[split].tobytes()
        assert (row[0], row[-1]) == (0, 0)
        by_split[split] = row[1:-1].split(b"\0")
    return by_split


def all_documents(by_split):
    return [document for split in SPLITS for document in by_split[split]]


def write_documents(root, count=12):
    """A folder of documents, a few hundred bytes each."""
    folder = root / "documents"
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:02}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(8)))
    return folder
