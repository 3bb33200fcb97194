"""Packages that import their public names at first use and list them in `dir`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str, offered: Sequence[str], homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`: `homes` says in which of its modules a name lies, by default each of
    `offered` is a module itself.

    Give them to the interpreter alone (`if not TYPE_CHECKING`): to a type checker a package with `__getattr__` has
    every name.
    """
    places = dict.fromkeys(offered, "") if homes is None else homes

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{places[name] or name}")
        return getattr(module, name) if places[name] else module

    return found, lambda: sorted(offered)
