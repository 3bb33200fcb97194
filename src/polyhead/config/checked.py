"""The base class of configurations.  msgspec checks the types and bounds of the fields in the constructor."""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polyhead.spec.shapes import one_of

# ------------------------------------------------------------------------------------------------------ types of fields
Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
"""Types of fields with bounds; a `Rate` of dropout is below 1, which would drop everything."""

MAX_BITS = 63
"""Integers of more bits are neither a size nor a seed."""


def choice(names: Iterable[str]) -> Meta:
    """The annotation of a string that must be one of `names`: `Annotated[str, choice(ACTS)]`."""
    return Meta(extra={"choices": tuple(names)})


# ------------------------------------------------------------------------------------------------ fields and the digest
def non_semantic(default: Any) -> Any:
    """A field that cannot change the result of a run; it is omitted from the digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"digest": "never"})


def omitted_at_default(default: Any) -> Any:
    """A field that enters the digest only with another value, so that runs from before it existed keep their digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"digest": "unless default"})


# ------------------------------------------------------------------------------------------------------- the base class
class Checked:
    """Base of frozen dataclasses: the constructor checks all fields against their annotations.

    It raises ValueError for a value of another type, outside its bounds or choices, and for NaN and infinite numbers.
    Lists become tuples, and integers in fields of numbers become floats, so that a configuration equals what is read
    from its file.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        # msgspec checks dictionaries, not constructors, so each field is converted by itself.
        for name, hint in field_types(cls).items():
            value = _check(f"{cls.__name__}: {name}", plain(getattr(self, name)), hint)
            # The dataclass is frozen.
            object.__setattr__(self, name, value)
            for choices in _choices(cls, name):
                if value is not None:
                    one_of(cls.__name__, name, value, choices)


@dataclasses.dataclass(frozen=True)
class Closed(Checked):
    """Base of parts whose kinds are all in the package: nothing would call the methods of a subclass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base = cls.__bases__[0].__name__
        if Closed not in cls.__bases__:
            raise TypeError(f"{cls.__name__}: {base} takes no subclasses; write a block of your own")


@dataclasses.dataclass(frozen=True)
class Task(Checked):
    """The base class of tasks, whose room is above this one: tasks/base.py has their methods."""


# ------------------------------------------------------------------------------------------------------------ one field
def _check(field: str, value: Any, hint: Any) -> Any:
    """`value` as msgspec converts it to the type `hint`; parts of a configuration are already built."""
    # msgspec would take an instance of a subclass for another type.
    classes = part_classes(hint)
    if classes:
        _check_part(field, value, hint, classes)
        return value
    if isinstance(value, (set, frozenset)):  # msgspec would take its members in an order that changes between processes
        raise ValueError(f"{field} must be a list but is a set")
    try:
        value = plain(msgspec.convert(value, hint))
    except TypeError:  # an annotation of a user's class that msgspec cannot read is not checked
        return value
    except msgspec.ValidationError as error:
        text = str(error).removeprefix("Expected ").replace("`", "")
        text = re.sub(r", got [^ ]*", "", text)  # the value is shown instead
        expected, _, position = text.partition(" - at $")
        expected = expected.replace("null", "None").replace("array", "list")
        raise ValueError(f"{field}{position} must be {expected} but is {value!r}") from None
    _check_numbers(field, value)
    return value


def _check_part(field: str, value: Any, hint: Any, classes: tuple[type, ...]) -> None:
    """Raise ValueError unless `value` is one of the classes; lists of parts are checked by their owner."""
    members = union_members(hint)
    if value is None and type(None) in members:
        return
    holds_lists = any(typing.get_origin(member) for member in members)
    if not holds_lists and not isinstance(value, classes):
        names = " or ".join(cls.__name__ for cls in classes)
        raise ValueError(f"{field} must be {names} but is {value!r}")


def _check_numbers(field: str, value: Any) -> None:
    """Raise ValueError for NaN, infinity and integers of too many bits: msgspec lets them pass."""
    if isinstance(value, tuple):
        for item in value:
            _check_numbers(field, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field} must be a finite number but is {value}")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"{field} must have at most {MAX_BITS} bits but has {value.bit_length()}")


def plain(value: Any) -> Any:
    """`value` with lists as tuples, and numbers of NumPy and members of enumerations as plain numbers and strings."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    # A Boolean is an integer to Python, but not to a reader of a configuration.
    if value is None or isinstance(value, bool):
        return value
    for basic in (int, float):
        if isinstance(value, basic):
            return basic(value)
    if isinstance(value, str):
        return str.__str__(value)
    return value


# ---------------------------------------------------------------------------------------------------------- annotations
@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _choices(cls: Any, name: str) -> list[tuple[str, ...]]:
    """The choices of a field: one tuple, or none."""
    choices = []
    for member in union_members(field_types(cls)[name]):
        for metadata in getattr(member, "__metadata__", ()):
            if isinstance(metadata, Meta) and metadata.extra:
                choices.append(metadata.extra["choices"])
    return choices


def union_members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; for any other type, the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def part_classes(hint: Any) -> tuple[type, ...]:
    """The configurations that a field of type `hint` may hold, also in lists."""
    classes: list[type] = []
    for member in union_members(hint):
        if dataclasses.is_dataclass(member):
            classes.append(typing.cast(type, member))
        elif typing.get_origin(member) is not Annotated:
            for element in typing.get_args(member):
                classes += part_classes(element)
    return tuple(dict.fromkeys(classes))
