"""Time and memory of an op's implementations, after a parity check: measure.py, sides.py (what is compared)."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

__all__ = ["measure", "sides"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
