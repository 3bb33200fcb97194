"""Other people's formats and interfaces, one file each: `cs336` (the Stanford course), `haiku` (a tutorial's
parameter tree)."""

import importlib
from typing import Any

_MODULES = ("cs336", "haiku")

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"polyhead.compat.{name}")
    raise AttributeError(f"module 'polyhead.compat' has no attribute {name!r}")
