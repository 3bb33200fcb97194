"""Configurations to JSON values and back, and JSON and YAML files.

A dataclass becomes an object with its class name under "kind".  Reading checks every field, kind and type, and errors
name the path of the wrong field.  Only classes that the caller lists can be built, so a file from a stranger runs no
code.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from polyhead.config.checked import part_classes
from polyhead.config.extensions import UnknownKind, find, kind_of
from polyhead.spec.shapes import one_of

MAX_ALIASES = 20


# -------------------------------------------------------------------------------------------------------------- writing
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
    return config


# Names such as train.lr, by which reports and sweeps compare runs.
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
        names |= flat(value, f"{prefix}.{name}".removeprefix("."))
    return names


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
    except RecursionError:
        raise ValueError(f"{path}: cannot be read (it is nested too deeply)") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper() or 'YAML'} ({reason})") from None


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields.  Raises ValueError for a field that is given twice: parsers keep the last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is given twice")
        values[name] = value
    return values


RESOLVERS: tuple[tuple[str, re.Pattern[str], list[str] | None], ...] = (
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"), None),
    ("tag:yaml.org,2002:null", re.compile("None$"), ["N"]),
)
"""What YAML 1.1 takes for strings and people write as numbers and as nothing: tag, expression, first letters."""


@functools.cache
def _yaml_loader() -> Any:
    """YAML in which 3e-4 is a number and None is null, as people write them, and no field is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        num_aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of aliases of aliases can stand for billions of values, or for a list that contains itself.
            self.num_aliases += self.check_event(yaml.AliasEvent)
            if self.num_aliases > MAX_ALIASES:
                raise ValueError(f"more than {MAX_ALIASES} aliases")
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            scalars = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _unique((key, None) for key in scalars)
            return node

    for resolver in RESOLVERS:
        Loader.add_implicit_resolver(*resolver)
    return Loader


def to_yaml(data: Any) -> str:
    """`data` as YAML that `_yaml_loader` reads back: a name such as 1e5 is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    for resolver in RESOLVERS:
        Dumper.add_implicit_resolver(*resolver)
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True))


# -------------------------------------------------------------------------------------------------------------- reading
def build(data: Any, default: type | None, known: Mapping[str, type], path: str, allowed: Iterable[type] = ()) -> Any:
    """The dataclass that `data` describes; its "kind" names a class of `known`, by default `default`.

    `allowed`: the classes that an error lists, if not all of `known`.  Raises ValueError, which begins with `path`,
    for unknown kinds (UnknownKind) and for unknown, missing or mistyped fields.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be an object with fields but is {data!r:.200}")
    cls = _class_of(data.get("kind"), default, known, path, tuple(allowed))
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in data.items():
        if name != "kind":
            one_of(path, "field", name, fields)
            values[name] = _build_parts(value, hints[name], known, f"{path}: {name}")
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


def _class_of(
    kind: object, default: type | None, known: Mapping[str, type], path: str, allowed: tuple[type, ...]
) -> Any:
    """The dataclass that "kind" names.  Raises UnknownKind, which lists the allowed classes."""
    names = [name for name, cls in known.items() if not allowed or issubclass(cls, allowed)]
    if kind is None:
        if default is None:
            raise ValueError(f'{path}: "kind" is missing (choose from {", ".join(names)})')
        return default
    if not isinstance(kind, str):
        raise ValueError(f'{path}: "kind" must be the name of a class but is {kind!r:.200}')
    if ":" in kind:
        return find(kind, path)
    if kind in known:
        return known[kind]
    if not names:
        raise UnknownKind(f"{path}: kind {kind!r} is not among kinds (for tasks: kinds=polyhead.tasks.KINDS)")
    try:
        return known[one_of(path, "kind", kind, names)]
    except ValueError as error:
        raise UnknownKind(str(error)) from None


def _build_parts(data: Any, hint: Any, known: Mapping[str, type], path: str) -> Any:
    """The value of a field of type `hint`: its objects become dataclasses, all else is checked by the constructor."""
    classes = part_classes(hint)
    if isinstance(data, list):
        return [_build_parts(item, hint, known, f"{path}[{i}]") for i, item in enumerate(data)]
    if not isinstance(data, dict) or not classes:
        return data
    # The kind may be omitted where one class is the usual one.
    usual = [cls for cls in classes if getattr(cls, "usual", len(classes) == 1)]
    default = usual[0] if usual else None
    return build(data, default, known, path, classes)


# -------------------------------------------------------------------------------------------------------------- numbers
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


def numbers(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `legal` for a table of scores: null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in scores.items()}
