"""What others add to the package: tasks, mechanisms, positions, feed-forward layers and recipes, by module and name.

A class outside the package is written to a file as "module:Class" and read back from a module that is imported already.
A file never imports anything: that is asked for, by `import`, by `--import MODULE`, by the environment variable
POLYHEAD_IMPORT (modules with commas between), or by an entry point that an installed package declares:

    [project.entry-points."polyhead.tasks"]
    parity = "my_package.tasks:Parity"
    [project.entry-points."polyhead.mechanisms"]
    Cosine = "my_package.heads:Cosine"
    [project.entry-points."polyhead.recipes"]
    parity-hyla = "my_package.recipes:parity_hyla"
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

BASES = {"Mechanism": "mechanisms", "Position": "positions", "FeedForward": "feedforwards"}
"""The base of a class -> what it is; a class without one is a task."""

GROUPS = {sort: f"polyhead.{sort}" for sort in ("tasks", *BASES.values(), "recipes")}
"""What a package may declare -> the group of its entry points."""

ASKED = "POLYHEAD_IMPORT"
"""The environment variable that names modules to import before a configuration is read."""

_ADDED: dict[str, dict[str, object]] = {sort: {} for sort in GROUPS}
"""What was registered in this process: sort -> name -> it."""

Added = TypeVar("Added", bound=Callable[..., object])


class UnknownKind(ValueError):
    """A file names a class that is not there: nothing is damaged."""


def register(added: Added, *, name: str | None = None) -> Added:
    """Make a class or a recipe (a function that returns runs) known by name; also a decorator.

    Classes are tasks, mechanisms, positions and feed-forward layers.

    `polyhead list`, `train`, `sweep`, ... then know it, where the module that registers it is imported, or declared as
    an entry point.  `name`: on the command line; by default that of the class, or of the function with "-" for "_".
    ValueError for a class or function that no other process could find again, and for a name that is taken.
    """
    if not callable(added):
        raise ValueError(f"register: a class or a recipe was wanted but {added!r} came")
    sort = _sort(added)
    name = name or (added.__name__.replace("_", "-") if sort == "recipes" else added.__name__)
    if "<" in added.__qualname__:  # of a function, or a lambda; as a decorator, we are asked before the name is set
        raise ValueError(f"register: {kind_of(added)} cannot be found again by its name; define it in a module")
    before = _ADDED[sort].get(name, added)
    if kind_of(before) != kind_of(added):  # the same anew, of a module that is loaded again, is fine
        raise ValueError(f"register: {name!r} is {kind_of(before)} already; give {kind_of(added)} another name")
    _ADDED[sort][name] = added
    return added


def _sort(added: Callable[..., object]) -> str:
    """What is added: a class is what its base is, without one a task."""
    if not isinstance(added, type):
        return "recipes"
    bases = {base.__name__ for base in added.__mro__ if not kind_of(base).count(":")}
    return next((sort for base, sort in BASES.items() if base in bases), "tasks")


def added(sort: str) -> dict[str, object]:
    """All that others added of a sort, by name: what was registered, and what installed packages declare."""
    return {**{point.name: _load(point) for point in _points(sort)}, **_ADDED[sort]}


def bring(modules: Iterable[str]) -> None:
    """Import modules by name, also from the working directory.  ValueError if one cannot be imported."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--import {module}: {error}") from error


def kind_of(thing: object) -> str:
    """What a file calls a class: its name alone, or "module:Class" where it is not of this package."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = getattr(thing, "__module__", "") or ""
    return name if module.partition(".")[0] == __name__.partition(".")[0] else f"{module}:{name}"


def find(kind: str, where: str) -> type:
    """The class that a file calls "module:Class".  UnknownKind unless its module is imported, or declares it."""
    module, _, name = kind.partition(":")
    bring(filter(None, os.environ.get(ASKED, "").split(",")))
    for point in (point for sort in GROUPS for point in _points(sort)):
        if point.value.replace(" ", "").partition("[")[0] == kind:
            _load(point)
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        way = f"import {module} first, or give --import {module}"
        raise UnknownKind(f"{where}: {kind} is not of this package; {way}")
    return found


def check_found(thing: object, who: str) -> None:
    """ValueError where a class or function cannot be found again by its module and name."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        raise ValueError(f"{who}: {name} of {module} cannot be found again by its name; define it in a module")


def foreign(config: object) -> Iterator[type]:
    """The classes in a configuration that are not of this package."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        if ":" in kind_of(type(config)):
            yield type(config)
        for field in dataclasses.fields(config):
            yield from foreign(getattr(config, field.name))
    elif isinstance(config, Sequence) and not isinstance(config, str):
        for item in config:
            yield from foreign(item)


def modules(config: object, who: str) -> list[str]:
    """Modules that another process must import to read a configuration.  ValueError where it could not."""
    found: dict[str, None] = {}
    for kind in foreign(config):
        check_found(kind, who)
        if kind.__module__ == "__main__":
            raise ValueError(f"{who}: {kind.__qualname__} is defined in the program itself; put it in a module")
        found[kind.__module__] = None
    return list(found)


@contextlib.contextmanager
def handed_on(config: object, who: str) -> Iterator[None]:
    """Processes that are started within it can read `config`.  ValueError where they could not."""
    needed, before = modules(config, who), {name: os.environ.get(name) for name in (ASKED, "PYTHONPATH")}
    if needed:
        places = [_place(module) for module in needed]
        os.environ[ASKED] = ",".join(filter(None, [before[ASKED], *needed]))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before["PYTHONPATH"], *dict.fromkeys(places)]))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _place(module: str) -> str:
    """The folder from which a module is imported."""
    top = sys.modules[module.partition(".")[0]]
    file = pathlib.Path(top.__file__ or next(iter(top.__path__)))
    return str((file.parent if file.name == "__init__.py" else file).parent.resolve())


def _load(point: importlib.metadata.EntryPoint) -> object:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{point.group}: {point.name} = {point.value} cannot be loaded ({error})") from error


@functools.cache
def _points(sort: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=GROUPS[sort]))
