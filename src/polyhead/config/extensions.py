"""Extensions by users: tasks, mechanisms, positions, feed-forward layers and recipes, by module and name.

A file names a class outside the package as "module:Class"; its module must be imported before the file is read.
Reading a file never imports a module.  Import it by `import`, by `--import MODULE`, by the environment variable
POLYHEAD_IMPORT (modules separated by commas), or by an entry point of an installed package:

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
"""Base class -> sort of the extension; a class without any of these bases is a task."""

GROUPS = {sort: f"polyhead.{sort}" for sort in ("tasks", *BASES.values(), "recipes")}
"""Sort of an extension -> the group of its entry points."""

ASKED = "POLYHEAD_IMPORT"
"""The environment variable that names modules to import before a configuration is read."""

_ADDED: dict[str, dict[str, object]] = {sort: {} for sort in GROUPS}
"""Extensions registered in this process: sort -> name -> extension."""

Added = TypeVar("Added", bound=Callable[..., object])


class UnknownKind(ValueError):
    """A file names an unknown class; the file itself is intact."""


def register(added: Added, *, name: str | None = None) -> Added:
    """Register a class or a recipe (a function that returns runs) under a name; also a decorator.

    Classes are tasks, mechanisms, positions and feed-forward layers.

    `polyhead list`, `train`, `sweep`, ... then know it, if its module is imported or declared as an entry point.
    `name` is used on the command line; by default it is the name of the class, or of the function with "-" for "_".
    Raises ValueError for a class or function that another process could not import, and for a name that is taken.
    """
    if not callable(added):
        raise ValueError(f"register: a class or a recipe was wanted but {added!r} came")
    sort = _sort(added)
    name = name or (added.__name__.replace("_", "-") if sort == "recipes" else added.__name__)
    if "<" in added.__qualname__:  # "<locals>" or "<lambda>"; a decorator runs before the name is bound
        raise ValueError(f"register: {kind_of(added)} cannot be found again by its name; define it in a module")
    before = _ADDED[sort].get(name, added)
    if kind_of(before) != kind_of(added):  # registering the same name again is allowed when a module is reloaded
        raise ValueError(f"register: {name!r} is {kind_of(before)} already; give {kind_of(added)} another name")
    _ADDED[sort][name] = added
    return added


def _sort(added: Callable[..., object]) -> str:
    """The sort of an extension, from its base class; a class without any of `BASES` is a task."""
    if not isinstance(added, type):
        return "recipes"
    bases = {base.__name__ for base in added.__mro__ if not kind_of(base).count(":")}
    return next((sort for base, sort in BASES.items() if base in bases), "tasks")


def added(sort: str) -> dict[str, object]:
    """All extensions of a sort, by name: registered ones, also by modules of POLYHEAD_IMPORT, and entry points of
    installed packages."""
    _bring_asked()
    return {**{point.name: _load(point) for point in _points(sort)}, **_ADDED[sort]}


def bring(modules: Iterable[str], asked: str = "--import") -> None:
    """Import modules by name, also from the working directory.

    Raises ValueError, which names where they were `asked` for, if one cannot be imported.
    """
    for module in modules:
        if not module or module.startswith("."):
            raise ValueError(f"{asked}: the name of a module was wanted, as in an import, but {module!r} came")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{asked} {module}: {error}") from error


def _bring_asked() -> None:
    bring(filter(None, os.environ.get(ASKED, "").split(",")), ASKED)


def kind_of(thing: object) -> str:
    """The name of a class in files: its name alone, or "module:Class" for a class outside this package."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = getattr(thing, "__module__", "") or ""
    return name if module.partition(".")[0] == __name__.partition(".")[0] else f"{module}:{name}"


def find(kind: str, where: str) -> type:
    """The class of the name "module:Class".  Raises UnknownKind unless its module is imported or it is an entry
    point."""
    module, _, name = kind.partition(":")
    _bring_asked()
    for point in (point for sort in GROUPS for point in _points(sort)):
        if point.value.replace(" ", "").partition("[")[0] == kind:
            _load(point)
    found = _imported(module, name)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        way = f"import {module} first, or give --import {module}"
        raise UnknownKind(f"{where}: {kind} is not of this package; {way}")
    return found


def _imported(module: str, name: str) -> object:
    """The object of that qualified name in an imported module, or None."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def check_found(thing: object, who: str) -> None:
    """Raise ValueError if a class or function cannot be imported by its module and name."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    if _imported(module, name) is not thing:
        raise ValueError(f"{who}: {name} of {module} cannot be found again by its name; define it in a module")


def foreign(config: object) -> Iterator[type]:
    """The classes in a configuration that are outside this package."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        if ":" in kind_of(type(config)):
            yield type(config)
        for field in dataclasses.fields(config):
            yield from foreign(getattr(config, field.name))
    elif isinstance(config, Sequence) and not isinstance(config, str):
        for item in config:
            yield from foreign(item)


def modules(config: object, who: str) -> list[str]:
    """Modules that another process must import to read a configuration.  Raises ValueError if it could not."""
    found: dict[str, None] = {}
    for kind in foreign(config):
        check_found(kind, who)
        if kind.__module__ == "__main__":
            raise ValueError(f"{who}: {kind.__qualname__} is defined in the program itself; put it in a module")
        found[kind.__module__] = None
    return list(found)


@contextlib.contextmanager
def handed_on(config: object, who: str) -> Iterator[None]:
    """Context manager: processes started inside can read `config`.  Raises ValueError if they could not."""
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
    """The folder that must be on the path to import a module."""
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
