"""Time and memory of an op, after a parity check: measure.py, sides.py (what is compared), options.py."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.timing import measure, options, sides

__all__ = ["measure", "options", "sides"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
