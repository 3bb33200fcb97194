"""Errors of the caller: a ValueError of one line, which begins with the name of what refuses."""

import re

import pytest


def refused(call, text):
    """`call` raises such an error; its message has a match of `text`."""
    with pytest.raises(ValueError, match=text) as error:
        call()
    assert re.fullmatch(r"[\w.]+: .+", str(error.value))
