"""Extensions by users: tasks, mechanisms and recipes, by module and name.

A file names a class outside the package as "module:Class"; its module must be imported before the file is read.
Reading a file never imports a module.  Import it by `import`, by `--import MODULE`, or by the environment variable
POLYHEAD_IMPORT (modules separated by commas).
"""

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

GROUPS = ("tasks", "mechanisms", "recipes")
"""The sorts of extensions."""

IMPORTS = "POLYHEAD_IMPORT"
"""The environment variable that names modules to import before a configuration is read."""

_ADDED: dict[str, dict[str, object]] = {sort: {} for sort in GROUPS}
"""Extensions registered in this process: sort -> name -> extension."""

Extension = TypeVar("Extension", bound=Callable[..., object])


# ---------------------------------------------------------------------------------------------------------- registering
def register(extension: Extension) -> Extension:
    """Register a task, a mechanism or a recipe (a function that returns runs); also a decorator.

    The command line then knows a class by its name, and a recipe by that of the function with "-" for "_".

    Raises:
        ValueError: For a class or function that another process could not import, and for a name that is taken.
    """
    if not callable(extension):
        raise ValueError(f"register: give a class or a recipe, got {extension!r}")
    if "<" in extension.__qualname__:  # "<locals>" or "<lambda>"; a decorator runs before the name is bound
        raise ValueError(f"register: {kind_of(extension)} cannot be found again by its name; define it in a module")
    sort, name = "tasks", extension.__name__
    if not isinstance(extension, type):
        sort, name = "recipes", name.replace("_", "-")
    elif "Mechanism" in map(kind_of, extension.__mro__):
        sort = "mechanisms"
    elif "Task" not in map(kind_of, extension.__mro__):
        raise ValueError(f"register: {kind_of(extension)} is neither a Task nor a Mechanism")
    earlier = _ADDED[sort].get(name, extension)
    if kind_of(earlier) != kind_of(extension):  # registering again is allowed when a module is reloaded
        raise ValueError(f"register: {name!r} is {kind_of(earlier)} already; give {kind_of(extension)} another name")
    _ADDED[sort][name] = extension
    return extension


def added(sort: str) -> dict[str, object]:
    """All registered extensions of a sort, by name, also those of modules of POLYHEAD_IMPORT."""
    _bring_from_environment()
    return dict(_ADDED[sort])


def with_added(sort: str, definitions: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """The `definitions` of polyhead and those of users, by name.

    Raises:
        ValueError: For one name with two definitions: a command would take either of them without a word.  The message
            begins with `caller`.
    """
    others = added(sort)
    for name, other in others.items():
        if name.lower() in map(str.lower, definitions):
            text = f"{name!r} is a {sort[:-1]} of polyhead; give {kind_of(other)} another name"
            raise ValueError(f"{caller}: {text}")
    return {**others, **definitions}


# -------------------------------------------------------------------------------------------------------------- finding
def bring(modules: Iterable[str], option: str = "--import") -> None:
    """Import modules by name, also from the working directory.

    Raises:
        ValueError: For a module that cannot be imported; the message names the `option` that asked for the module.
    """
    for module in modules:
        if not module or module.startswith("."):
            raise ValueError(f"{option}: give the name of a module, as in an import, got {module!r}")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{option} {module}: {error}") from error


def _bring_from_environment() -> None:
    bring(filter(None, os.environ.get(IMPORTS, "").split(",")), IMPORTS)


def kind_of(definition: object) -> str:
    """The name of a class in files: its name alone, or "module:Class" for a class outside this package."""
    name = getattr(definition, "__qualname__", type(definition).__qualname__)
    module = getattr(definition, "__module__", "") or ""
    is_ours = module.partition(".")[0] == __name__.partition(".")[0]
    return name if is_ours else f"{module}:{name}"


def find(kind: str, path: str, allowed: tuple[type, ...]) -> type:
    """The class of the name "module:Class".

    Raises:
        ValueError: Unless the module is imported and has a dataclass of that name, derived from one of `allowed`; the
            message begins with `path`.
    """
    module, _, name = kind.partition(":")
    _bring_from_environment()
    cls = _imported(module, name)
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise ValueError(f"{path}: {kind} is not of this package; import {module} first, or give --import {module}")
    if not issubclass(cls, allowed):  # making any other class could do anything
        raise ValueError(f"{path}: {kind} is no {' or '.join(base.__name__ for base in allowed)}")
    return cls


def _imported(module: str, name: str) -> object:
    """The object of that qualified name in an imported module, or None."""
    definition: object = sys.modules.get(module)
    for part in name.split("."):
        definition = getattr(definition, part, None)
    return definition


# ---------------------------------------------------------------------------------------- handing on to other processes
def foreign(config: object, caller: str) -> dict[str, type]:
    """The classes in a configuration that are outside this package, by their names in files.

    Raises:
        ValueError: For a class that cannot be imported by its module and name; the message begins with `caller`.
    """
    kinds: dict[str, type] = {}
    if isinstance(config, (list, tuple)):
        for item in config:
            kinds |= foreign(item, caller)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        cls = type(config)
        if ":" in kind_of(cls):
            if _imported(cls.__module__, cls.__qualname__) is not cls:
                name = f"{cls.__qualname__} of {cls.__module__}"
                raise ValueError(f"{caller}: {name} cannot be found again by its name; define it in a module")
            kinds[kind_of(cls)] = cls
        for field in dataclasses.fields(config):
            kinds |= foreign(getattr(config, field.name), caller)
    return kinds


@contextlib.contextmanager
def handed_on(config: object, caller: str) -> Iterator[None]:
    """Context manager: processes started inside can read `config`.  Raises ValueError if they could not."""
    modules: dict[str, None] = {}
    for kind in foreign(config, caller).values():
        if kind.__module__ == "__main__":
            raise ValueError(f"{caller}: {kind.__qualname__} is defined in the program itself; put it in a module")
        modules[kind.__module__] = None
    before = dict(os.environ)
    if modules:
        os.environ[IMPORTS] = ",".join(filter(None, [before.get(IMPORTS), *modules]))
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, sys.path))
    try:
        yield
    finally:
        for name in (IMPORTS, "PYTHONPATH"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
