"""Many runs: `sweep`, `population` (many runs in one process), `tune`; and `plan` (estimates for other hardware)."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.scale import plan, population, sweep, tune

__all__ = ["plan", "population", "sweep", "tune"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
