"""Configurations from JSON and YAML files: the way back from `to_dict`.

Errors name the path of the wrong field.  Only classes that the caller lists are built: a stranger's file runs no code.
"""

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from polyhead import extensions
from polyhead.config.checked import field_types, part_classes
from polyhead.spec.shapes import one_of
from polyhead.spec.values import one_line


# ---------------------------------------------------------------------------------------------------------------- files
def read(path: str | pathlib.Path) -> Any:
    """The JSON or YAML values in a file.  Raises ValueError in one line if it cannot be read."""
    import yaml

    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, Loader=_yaml_loader())
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", "it is nested too deeply")
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper() or 'YAML'} ({one_line(error)})") from None


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields.  Raises ValueError for a field that is given twice: parsers keep the last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is given twice")
        values[name] = value
    return values


@functools.cache
def _yaml_loader() -> Any:
    """YAML in which 3e-4 is a number, as people write it, without aliases and fields that are given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of aliases of aliases can stand for billions of values, or for a list that contains itself.
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases are not read: write the value again")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            return _unique(self.construct_pairs(node, deep))

    number = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, None)
    return Loader


# -------------------------------------------------------------------------------------------------------------- reading
def build(data: Any, known: Mapping[str, type], path: str, allowed: tuple[type, ...]) -> Any:
    """The dataclass that `data` describes.  Its "kind" names a class of `known` that is among `allowed`, and may be
    missing if there is only one.  Raises ValueError, which begins with `path`."""
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be an object with fields but is {data!r:.200}")
    cls = _class_of(data, known, path, allowed)
    hints = field_types(cls)
    values = {}
    for name, value in data.items():
        if name != "kind":
            one_of(path, "field", name, hints)
            values[name] = _build_parts(value, part_classes(hints[name]), known, f"{path}: {name}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _class_of(data: Mapping[str, Any], known: Mapping[str, type], path: str, allowed: tuple[type, ...]) -> Any:
    """The dataclass of an object, by its "kind"."""
    choices = {name: cls for name, cls in known.items() if issubclass(cls, allowed)}
    if "kind" not in data:
        if len(choices) != 1:
            raise ValueError(f'{path}: "kind" is missing (choose from {", ".join(choices)})')
        return next(iter(choices.values()))
    kind = data["kind"]
    if isinstance(kind, str) and ":" in kind:
        return extensions.find(kind, path)
    if not choices:
        raise ValueError(f"{path}: kind {kind!r} is not among kinds (for tasks: kinds=polyhead.tasks.KINDS)")
    return choices[one_of(path, "kind", kind, choices)]


def _build_parts(data: Any, allowed: tuple[type, ...], known: Mapping[str, type], path: str) -> Any:
    """The value of a field: its objects become dataclasses, all else is checked by the constructor."""
    if isinstance(data, list):
        return [_build_parts(item, allowed, known, f"{path}[{i}]") for i, item in enumerate(data)]
    if isinstance(data, dict) and allowed:
        return build(data, known, path, allowed)
    return data
