"""Fixtures of the tests on text."""

import pytest
from texts import lines

from polyhead.tasks.text import data as text_data


@pytest.fixture
def afresh():
    """As in a new process."""
    text_data._open.cache_clear()
    text_data._CHECKED.clear()


@pytest.fixture
def folder(tmp_path):
    """Sixty files of text, in folders, and things that are none."""
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    for number in range(60):
        (root / ("inner" if number % 2 else ".") / f"{number}.txt").write_text(lines(20 + 2 * number, number))
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xff")
    (root / ".hidden.txt").write_text("hidden")
    return root
