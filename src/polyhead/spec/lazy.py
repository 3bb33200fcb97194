"""Packages that import their public names at first use; what `dir` of a module lists; names that have changed."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str, offered: Sequence[str], homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`: `homes` maps a name to the module that defines it; other names of
    `offered` are modules.

    Assign them under `if not TYPE_CHECKING`: for a type checker, a package with `__getattr__` has every name.
    """
    places = dict.fromkeys(offered, "") if homes is None else homes

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{places[name] or name}")
        value = getattr(module, name) if places[name] else module
        setattr(sys.modules[package], name, value)  # found once
        return value

    return found, lambda: sorted(offered)


def own_names(module: str, *also: str) -> Callable[[], list[str]]:
    """`__dir__` of a module: its public functions and classes, and `also`; not what it imports."""

    def listed() -> list[str]:
        names = vars(sys.modules[module]).items()
        own = (n for n, value in names if callable(value) and getattr(value, "__module__", "") == module)
        return sorted({*also, *(name for name in own if name[0] != "_")})

    return listed


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """`__getattr__` of a module with renamed names, old -> new; old names work with a DeprecationWarning."""

    def found(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {module}.{names[name]} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), names[name])

    return found
