"""What a command prints beside its result."""

import warnings

from polyhead.cli.output import short_warnings
from polyhead.config import BlindToOrder


def test_a_warning_of_ours_is_one_line():
    plain = warnings.formatwarning
    with short_warnings():
        assert warnings.formatwarning("Transformer: x", BlindToOrder, "f.py", 3) == "polyhead: Transformer: x\n"
        assert warnings.formatwarning("y", UserWarning, "f.py", 3) == plain("y", UserWarning, "f.py", 3)
    assert warnings.formatwarning is plain
