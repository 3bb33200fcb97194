"""Many runs: `sweep` trains them, `records` reads them back as a table."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.scale import records, sweep

__all__ = ["records", "sweep"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
