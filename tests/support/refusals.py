"""Errors of the caller: a ValueError of one line."""

import contextlib
import re

import pytest


def refused(call, text):
    """`call` raises such an error, which begins with the name of what refuses; its message has a match of `text`."""
    with pytest.raises(ValueError, match=text) as error:
        call()
    assert re.fullmatch(r"[\w.]+: .+", str(error.value))


@contextlib.contextmanager
def refusing(line):
    """The code inside raises such an error, which holds `line`."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is compared below)
        yield
    message = str(caught.value)
    assert line in message
    assert "\n" not in message
