"""Frozen dataclasses to JSON values and back, and JSON and YAML files.

A dataclass becomes an object with its class name under "kind".  Reading checks every field, kind and type, and errors
name the path of the wrong field.  Only classes that the caller lists can be built, so a file from a stranger runs no
code.
"""

import dataclasses
import functools
import json
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.config.checked import element_hints, type_hints, union_members
from polyhead.config.extensions import UnknownKind, find, kind_of
from polyhead.spec.shapes import one_of

Name = typing.TypeVar("Name")
Value = typing.TypeVar("Value")

MAX_VALUES, MAX_DEPTH, SHOWN = 100_000, 100, 200


def to_dict(config: Any, *, semantic: bool = False) -> Any:
    """`config` as JSON values; `semantic` omits the fields that do not enter the digest."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {"kind": kind_of(type(config))}
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            role = field.metadata.get("digest", "always")
            is_omitted = role == "never" or (role == "unless default" and value == field.default)
            if not (semantic and is_omitted):
                values[field.name] = to_dict(value, semantic=semantic)
        return values
    if isinstance(config, (list, tuple)):
        return [to_dict(item, semantic=semantic) for item in config]
    if isinstance(config, bool):
        return config
    for plain in (int, float, str):  # a number of NumPy or a member of an enumeration: YAML writes only plain values
        if isinstance(config, plain):
            return plain.__str__(config) if plain is str else plain(config)
    return config


def flat(values: object, prefix: str = "") -> dict[str, object]:
    """What `to_dict` gives, by dotted names.

    >>> flat({"train": {"lr": 0.1, "betas": [0.9, 0.99]}, "heads": [{"heads": 2}]})
    {'train.lr': 0.1, 'train.betas': [0.9, 0.99], 'heads.0.heads': 2}
    """
    if isinstance(values, dict):
        pairs = list(values.items())
    elif isinstance(values, list) and any(isinstance(value, (dict, list)) for value in values):
        pairs = list(enumerate(values))
    else:
        return {prefix: values}
    names: dict[str, object] = {}
    for name, value in pairs:
        names |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return names


def read(path: str | pathlib.Path) -> Any:
    """The JSON or YAML values in a file.  Raises ValueError in one line if it cannot be read."""
    import yaml

    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text, object_pairs_hook=_object)
        else:
            values = yaml.load(text, Loader=_yaml_loader())
        check_size(values)
        return values
    except RecursionError:
        raise ValueError(f"{path}: cannot be read (it is nested too deeply)") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper() or 'YAML'} ({reason})") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    check_once([name for name, _ in pairs])
    return dict(pairs)


@functools.cache
def _yaml_loader() -> Any:
    import yaml

    class UniqueKeysLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            check_once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    return UniqueKeysLoader


def check_once(names: Sequence[str]) -> None:
    """Raise a ValueError for a field that is given twice: parsers keep the last value without a word."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")


def check_size(values: Any) -> None:
    """Raise ValueError for too many values or too much nesting.

    By aliases, a few lines of YAML can hold billions of values, or a list that contains itself.
    """
    count, waiting = 0, [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        children: list[Any] = []
        if isinstance(value, (dict, list)):
            children = list(value.values()) if isinstance(value, dict) else value
        waiting += [(child, depth + 1) for child in children]
        count += 1 + len(children)
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_VALUES} values or is nested more than {MAX_DEPTH} deep")


def build(data: Any, default: Any, known: Mapping[str, type], path: str, allowed: Sequence[type] = ()) -> Any:
    """The dataclass that `data` describes; its "kind" names a class of `known`, by default `default`.

    `allowed`: the classes that an error lists, if not all of `known`.  Raises ValueError, which begins with `path`,
    for unknown kinds (UnknownKind) and for unknown, missing or mistyped fields.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{path}: an object with fields was wanted but {shown(data)} came")
    kind = data.get("kind")
    if kind is None:
        cls = default
    elif not isinstance(kind, str):
        raise ValueError(f'{path}: "kind" must be the name of a class but is {shown(kind)}')
    else:
        cls = find(kind, path) if ":" in kind else _known_class(kind, known, path, allowed)
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise ValueError(f'{path}: "kind" is missing (choose from {", ".join(known)})')
    hints = type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in data.items():
        if name != "kind":
            one_of(path, "field", name, list(fields))
            values[name] = _read_value(value, hints[name], known, f"{path}: {name}")
    missing = []
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory:  # both are MISSING
            missing.append(name)
    if missing:
        raise ValueError(f"{path}: {cls.__name__} needs {', '.join(missing)}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _known_class(kind: str, known: Mapping[str, type], path: str, allowed: Sequence[type]) -> type:
    """The class of this package with that name.  UnknownKind lists the allowed classes."""
    if kind in known:
        return known[kind]
    names = [name for name, cls in known.items() if not allowed or issubclass(cls, tuple(allowed))]
    if not names:
        raise UnknownKind(f"{path}: kind {kind!r} is not among kinds (for tasks: kinds=polyhead.tasks.KINDS)")
    try:
        return known[one_of(path, "kind", kind, names)]
    except ValueError as error:
        raise UnknownKind(str(error)) from None


def _read_value(data: Any, hint: Any, known: Mapping[str, type], path: str) -> Any:
    """The value of a field of type `hint`."""
    options = union_members(hint)
    if data in (None, "None") and type(None) in options:  # YAML's word is null, but the command line's is None
        return None
    if isinstance(data, dict):
        return _read_object(data, hint, known, path)
    sequences = [option for option in options if typing.get_origin(option) in (tuple, Sequence)]
    if isinstance(data, (list, tuple)) and sequences:
        hints = element_hints(sequences[0], len(data))
        if len(data) != len(hints):
            raise ValueError(f"{path}: {len(hints)} values were wanted but {shown(list(data))} came")
        return tuple(_read_value(value, inner, known, path) for value, inner in zip(data, hints, strict=True))
    if type(data) in options:
        return data
    if float in options and isinstance(data, (int, str)) and not isinstance(data, bool):
        try:
            return float(data)  # YAML reads 3e-4 as a string, and an integer is a valid float
        except (ValueError, OverflowError):
            pass
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{path}: {names} was wanted but {shown(data)} came")


def _read_object(data: dict[str, Any], hint: Any, known: Mapping[str, type], path: str) -> Any:
    """The dataclass in a field.  Its "kind" may be omitted where one class is the usual one."""
    classes = [option for option in union_members(hint) if dataclasses.is_dataclass(option)]
    usual = [option for option in classes if getattr(option, "usual", len(classes) == 1)]
    allowed = [option for option in classes if isinstance(option, type)]
    value = build(data, usual[0] if usual else None, known, path, allowed)
    if not isinstance(value, tuple(allowed)):
        names = " or ".join(option.__name__ for option in allowed)
        raise ValueError(f"{path}: {names or hint} was wanted but {type(value).__name__} came")
    return value


def shown(value: Any) -> str:
    """A value for an error message: its repr, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def legal(value: object) -> object:
    """`value` with null for NaN and infinite, which JSON does not have.

    >>> legal({"r2": 0.5, "r2_se": float("nan")})
    {'r2': 0.5, 'r2_se': None}
    """
    if isinstance(value, dict):
        return {str(name): legal(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [legal(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(scores: Mapping[Name, Value | None]) -> dict[Name, Value | float]:
    """The inverse of `legal` for a table of scores: null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in scores.items()}
