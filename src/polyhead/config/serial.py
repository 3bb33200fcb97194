"""Configurations from JSON values: the way back from `to_dict`.

Errors name the path of the wrong field.  Only classes that the caller lists are built: a stranger's file runs no code.
"""

from collections.abc import Mapping
from typing import Any

from polyhead import extensions
from polyhead.spec.checked import field_types, part_classes
from polyhead.spec.shapes import one_of


def build(data: Any, known: Mapping[str, type], path: str, allowed: tuple[type, ...]) -> Any:
    """The dataclass that `data` describes.

    Args:
        known: Classes by the "kind" that names them.
        path: The place of `data` in its file.
        allowed: Bases of the classes that may stand here.  If there is one class, "kind" may be missing.

    Raises:
        ValueError: For an unknown kind, field or value; the message begins with `path`.
    """
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
        return extensions.find(kind, path, allowed)
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
