"""Frozen dataclasses to JSON values and back.

A dataclass becomes an object with its class name under "kind".  Reading checks every field, kind and type, and errors
name the wrong field.  Only classes that the caller lists can be built, so a file from a stranger runs no code.
"""

import dataclasses
import functools
import inspect
import json
import math
import pathlib
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from polyhead.config.extensions import UnknownKind, find, kind_of
from polyhead.spec.shapes import check_number, one_of

if typing.TYPE_CHECKING:
    import yaml

Name = typing.TypeVar("Name")
Value = typing.TypeVar("Value")


def non_semantic(default: Any) -> Any:
    """A field that cannot change the result of a run; it is omitted from the digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"semantic": False})


def added_later(default: Any) -> Any:
    """A field that was added later; at its default it is omitted from the digest, so earlier runs keep their id."""
    return dataclasses.field(default=default, kw_only=True, metadata={"added_later": True})


class Checked:
    """Base of frozen dataclasses: checks fields that are Booleans, numbers or strings.

    The constructor raises ValueError for another type, as `causal="no"` would count as True, for nan and inf, and for
    values that the tables of the class or of its bases exclude: `_choices` lists the names that a field may have,
    `_least` and `_most` the bounds of a number.  None passes, where the type allows it.
    """

    _choices: ClassVar[Mapping[str, Iterable[str]]] = {}
    _least: ClassVar[Mapping[str, int]] = {}
    _most: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        kind: Any = type(self)
        _check_names(kind)
        for name in _tuple_fields(kind):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{kind.__name__}: {name} must be a list but is {value!r}")
            if isinstance(value, list):  # as it would be read from a file; a list has no hash, and may change
                object.__setattr__(self, name, tuple(value))
        for name, kinds, wanted in _plain_fields(kind):
            value = getattr(self, name)
            if type(value) is int and value.bit_length() > 63:
                raise ValueError(f"{kind.__name__}: {name} has {value.bit_length()} bits, which no size or seed has")
            if type(value) not in kinds and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ValueError(f"{kind.__name__}: {name} must be {wanted} but is {value!r}")
            if isinstance(value, float):  # neither JSON nor a range such as `x <= 0` knows nan and inf
                check_number(kind.__name__, name, value)
        choices, least, most = _tables(kind)
        for name in {**choices, **least, **most}:
            value = getattr(self, name)
            if value is None:
                continue
            if name in choices:
                one_of(kind.__name__, name, value, choices[name])
            if name in least:
                check_number(kind.__name__, name, value, least[name])
            if name in most and value > most[name]:
                raise ValueError(f"{kind.__name__}: {name} must be at most {most[name]} but is {value}")


@functools.cache
def _check_names(cls: type[Checked]) -> None:
    """Raise ValueError for a field or a property that hides a method of a base, as `count: int` of a user's task hides
    `Task.count`, and for a method that hides a property, as `def pairs(self)` without @property hides `Task.pairs`:
    else the first use would fail, which may be after hours of training."""
    own = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for base in cls.__mro__[1:]:
        for name, theirs in vars(base).items():
            ours = None if name in own else inspect.getattr_static(cls, name)
            if name.startswith("_") or name in getattr(base, "__dataclass_fields__", ()):
                continue  # a field of the base may be callable, as an activation is
            if callable(ours) == callable(theirs):
                continue
            what = "the method {}()" if callable(ours) else "the field {}" if name in own else "the property {}"
            hidden = f"{base.__name__}.{name}"
            hidden, way = (f"the method {hidden}()", "") if callable(theirs) else (hidden, " or @property")
            raise ValueError(f"{cls.__name__}: {what.format(name)} hides {hidden}: give it another name{way}")


@functools.cache
def _tables(cls: type[Checked]) -> tuple[dict[str, Iterable[str]], dict[str, int], dict[str, int]]:
    """`_choices`, `_least` and `_most` of a class, with the entries of its bases."""
    bases = [base for base in reversed(cls.__mro__) if issubclass(base, Checked)]
    choices = {name: valid for base in bases for name, valid in base._choices.items()}
    least = {name: bound for base in bases for name, bound in base._least.items()}
    return choices, least, {name: bound for base in bases for name, bound in base._most.items()}


_PLAIN = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}


@functools.cache
def _plain_fields(cls: type) -> list[tuple[str, tuple[type, ...], str]]:
    """The fields of these types: name, allowed types (a number may be an integer), and these in words."""
    hints, found = _hints(cls), []
    for f in dataclasses.fields(cls):
        options = _options(hints[f.name])
        if _PLAIN.keys() >= set(options):
            kinds = (*options, int) if float in options else options
            found.append((f.name, kinds, " or ".join(_PLAIN[option] for option in options)))
    return found


@functools.cache
def _tuple_fields(cls: type) -> list[str]:
    """The fields that hold a tuple."""
    hints = _hints(cls)
    return [f.name for f in dataclasses.fields(cls) if typing.get_origin(hints[f.name]) is tuple]


def to_dict(config: Any, *, semantic: bool = False) -> Any:
    """`config` as JSON values; `semantic` omits the fields that cannot change a result."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [f for f in dataclasses.fields(config) if not semantic or _counts(config, f)]
        hints = _hints(type(config))
        values = {f.name: to_dict(_floats(getattr(config, f.name), hints[f.name]), semantic=semantic) for f in fields}
        return {"kind": kind_of(type(config)), **values}
    if isinstance(config, (list, tuple)):
        return [to_dict(item, semantic=semantic) for item in config]
    if isinstance(config, bool):
        return config
    return next((exact(config) for kind, exact in _EXACT.items() if isinstance(config, kind)), config)


_EXACT: dict[type, Callable[..., object]] = {int: int.__int__, float: float.__float__, str: str.__str__}
"""A value of a subclass, as NumPy's float64 or a member of an enumeration, as a plain one: YAML writes no others."""


def flat(values: object, prefix: str = "") -> dict[str, object]:
    """What `to_dict` gives, by dotted names.

    >>> flat({"train": {"lr": 0.1, "betas": [0.9, 0.99]}, "heads": [{"heads": 2}]})
    {'train.lr': 0.1, 'train.betas': [0.9, 0.99], 'heads.0.heads': 2}
    """
    if isinstance(values, dict):
        pairs = [(str(name), value) for name, value in values.items()]
    elif isinstance(values, list) and any(isinstance(one, (dict, list)) for one in values):
        pairs = [(str(i), value) for i, value in enumerate(values)]
    else:
        return {prefix: values}
    return {k: v for name, one in pairs for k, v in flat(one, f"{prefix}.{name}" if prefix else name).items()}


def _counts(config: Any, f: "dataclasses.Field[Any]") -> bool:
    """Whether a field enters the digest: it can change a result and is not a later addition at its default."""
    absent = f.metadata.get("added_later") and getattr(config, f.name) == f.default
    return f.metadata.get("semantic", True) and not absent


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; for any other type, the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _floats(value: Any, hint: Any) -> Any:
    """Convert integers to floats in float fields, so that the file, its digest and the value read back agree."""
    options = _options(hint)
    if type(value) is int and float in options and int not in options:
        return float(value)
    if isinstance(value, (list, tuple)) and (lists := [o for o in options if _is_list(o)]):
        inner = _inner(lists[0], len(value))
        return [_floats(*pair) for pair in zip(value, inner, strict=True)] if len(inner) == len(value) else list(value)
    return value


def read(path: str | pathlib.Path) -> Any:
    """The JSON or YAML values in a file."""
    import yaml

    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_object) if path.suffix == ".json" else _from_yaml(text)
        measure(values)
        return values
    except RecursionError:
        raise ValueError(f"{path}: cannot be read (it is nested too deeply)") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper() or 'YAML'} ({reason})") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    _check_once([name for name, _ in pairs])
    return dict(pairs)


def _from_yaml(text: str) -> object:
    loader = _loader()(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@functools.cache
def _loader() -> "type[yaml.SafeLoader]":
    import yaml

    class UniqueKeysLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: object) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)  # type: ignore[arg-type]
            _check_once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    return UniqueKeysLoader


def _check_once(names: Sequence[str]) -> None:
    """Raise a ValueError for a field that is given twice: parsers keep the last value without a word."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")


def measure(values: Any) -> None:
    """Raise ValueError for too many values or too much nesting.  By aliases, a few lines of YAML can hold billions of
    values, or a list that contains itself."""
    count, waiting = 0, [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        waiting += [(item, depth + 1) for item in inner]
        count += 1 + len(inner)
        if count > VALUES or depth > DEPTH:
            raise ValueError(f"it has more than {VALUES} values or is nested more than {DEPTH} deep")


VALUES, DEPTH = 100_000, 100


def shown(value: Any) -> str:
    """A value for an error message: its repr, shortened if it is long."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else _SHORT.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 12
_SHORT.maxstring = _SHORT.maxother = 200


def build(data: Any, wanted: Any, known: Mapping[str, type], where: str, sorts: Sequence[type] = ()) -> Any:
    """The dataclass that `data` describes; its "kind" names a class of `known`, by default `wanted`.

    `sorts`: the classes allowed here, if not all of `known`.  Raises ValueError, which names `where`, for unknown kinds
    (UnknownKind) and for unknown, missing or mistyped fields.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: an object with fields was wanted but {shown(data)} came")
    data = dict(data)
    kind = data.pop("kind", None)
    if not isinstance(kind, (str, type(None))):
        raise ValueError(f'{where}: "kind" must be the name of a class but is {shown(kind)}')
    cls = wanted if kind is None else find(kind, where) if ":" in kind else _known(kind, known, where, sorts)
    if cls is None or not dataclasses.is_dataclass(cls):
        raise ValueError(f'{where}: "kind" is missing (choose from {", ".join(known)})')
    hints = _hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values = {n: _value(data[n], hints[one_of(where, "field", n, names)], known, f"{where}: {n}") for n in data}
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _required(f)]
    if missing:
        raise ValueError(f"{where}: {cls.__name__} needs {', '.join(missing)}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _known(kind: str, known: Mapping[str, type], where: str, sorts: Sequence[type]) -> type:
    """The class of this package with that name.  UnknownKind lists the allowed classes."""
    if kind in known:
        return known[kind]
    fitting = [name for name, cls in known.items() if not sorts or issubclass(cls, tuple(sorts))]
    if not fitting:
        raise UnknownKind(f"{where}: kind {kind!r} is not among kinds (for tasks: kinds=polyhead.tasks.KINDS)")
    try:
        one_of(where, "kind", kind, fitting)
    except ValueError as error:
        raise UnknownKind(str(error)) from None
    raise AssertionError(kind)


def _required(f: "dataclasses.Field[Any]") -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _value(data: Any, hint: Any, known: Mapping[str, type], where: str) -> Any:
    options = _options(hint)
    if data in (None, "None") and type(None) in options:  # YAML's word is null, but the command line's is None
        return None
    if isinstance(data, dict):
        classes = [o for o in options if dataclasses.is_dataclass(o)]
        usual = [o for o in classes if getattr(o, "usual", len(classes) == 1)]  # classes whose "kind" may be omitted
        sorts = [c for c in classes if isinstance(c, type)]
        built = build(data, usual[0] if usual else None, known, where, sorts)
        if not isinstance(built, tuple(sorts)):
            names = " or ".join(getattr(c, "__name__", str(c)) for c in classes)
            raise ValueError(f"{where}: {names or hint} was wanted but {type(built).__name__} came")
        return built
    if isinstance(data, (list, tuple)) and (lists := [o for o in options if _is_list(o)]):
        wanted = _inner(lists[0], len(data))
        if len(data) != len(wanted):
            raise ValueError(f"{where}: {len(wanted)} values were wanted but {shown(list(data))} came")
        return tuple(_value(item, inner, known, where) for item, inner in zip(data, wanted, strict=True))
    return _scalar(data, options, where)


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) in (tuple, Sequence)


def _inner(hint: object, count: int) -> tuple[object, ...]:
    """The types in a tuple or sequence of that type, which holds `count` values unless its own number is fixed."""
    inner = typing.get_args(hint)
    fixed = typing.get_origin(hint) is tuple and inner[-1] is not ...
    return inner if fixed else inner[:1] * count


def _scalar(data: Any, options: tuple[Any, ...], where: str) -> Any:
    if any(isinstance(o, type) and type(data) is o for o in options):
        return data
    if float in options and isinstance(data, (int, str)) and not isinstance(data, bool):
        try:
            return float(data)  # YAML reads 3e-4 as a string, and an integer is a valid float
        except (ValueError, OverflowError):
            pass
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise ValueError(f"{where}: {wanted} was wanted but {shown(data)} came")


def legal(value: object) -> object:
    """`value` with null for NaN and infinite, which JSON does not have.

    >>> legal({"r2": 0.5, "r2_se": float("nan")})
    {'r2': 0.5, 'r2_se': None}
    """
    if isinstance(value, dict):
        return {str(name): legal(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [legal(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(scores: Mapping[Name, Value | None]) -> dict[Name, Value | float]:
    """The inverse of `legal` for a table of scores: null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in scores.items()}
