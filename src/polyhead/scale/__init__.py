"""Many runs, or one on other machines: `sweep`, `population` (many runs in one process), `plan`, `tune`."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.scale import plan, population, sweep, tune

__all__ = ["plan", "population", "sweep", "tune"]

if not TYPE_CHECKING:  # to a type checker a module with this function would have every name

    def __getattr__(name: str) -> ModuleType:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
