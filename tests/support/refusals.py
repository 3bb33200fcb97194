"""Errors that tell a caller in one line what was wanted."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(line):
    """The code inside raises a ValueError of one line that holds `line`."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is compared below)
        yield
    said = str(caught.value)
    assert line in said
    assert "\n" not in said
