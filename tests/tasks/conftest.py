"""Fixtures of the tests on text."""

import pytest
from texts import lines


@pytest.fixture
def folder(tmp_path):
    """Sixty files of text, in folders, and files that are no text."""
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    for number in range(60):
        (root / ("inner" if number % 2 else ".") / f"{number}.txt").write_text(lines(20 + 2 * number, number))
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xff")
    (root / ".hidden.txt").write_text("hidden")
    return root
