"""The base classes of configurations and tasks: msgspec checks the fields in the constructor."""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

# ------------------------------------------------------------------------------------------------------ types of fields
MAX_INT = 2**63 - 1  # a larger integer is neither a size nor a seed
LARGEST = 4096  # layers, neighbours, seeds of a figure, so that a file with 10^12 layers is refused at once

Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
Index = Annotated[int, Meta(ge=0, le=MAX_INT)]
LayerCount = Annotated[int, Meta(ge=1, le=LARGEST)]
Seed = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
"""Types of fields with bounds; a `Rate` of dropout is below 1, which would drop everything."""


def choice(names: Iterable[str]) -> Meta:
    """The annotation of a string that must be one of `names`: `Annotated[str, choice(ACTS)]`."""
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


def non_semantic(default: Any) -> Any:
    """A field that cannot change the result of a run; it is omitted from the digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"semantic": False})


# ----------------------------------------------------------------------------------------------------- the base classes
class Checked:
    """Base of frozen dataclasses: the constructor checks all fields against their annotations.

    Lists become tuples, and integers in fields of numbers floats, so that a configuration equals that of its file.

    Raises:
        ValueError: For a value of another type or outside its bounds or choices, and for NaN and infinity.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        # msgspec checks dictionaries, not constructors, so each field is converted by itself.
        for name, hint in field_types(cls).items():
            if name == "kind":
                raise ValueError(f"{cls.__name__}: no field may be called 'kind', the name of the class in files")
            value = _check(f"{cls.__name__}: {name}", getattr(self, name), hint)
            object.__setattr__(self, name, value)  # the dataclass is frozen


@dataclasses.dataclass(frozen=True)
class Closed(Checked):
    """Base of parts whose kinds are all in the package: nothing would call the methods of a subclass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base = cls.__bases__[0]
        if base is not Closed:
            raise TypeError(f"{cls.__name__}: {base.__name__} takes no subclasses; write a block of your own")


@dataclasses.dataclass(frozen=True)
class Task(Checked):
    """The base class of tasks, whose room is above this one: tasks/base.py has their methods."""


# ------------------------------------------------------------------------------------------------------------ one field
def _check(field: str, value: Any, hint: Any) -> Any:
    """`value` as msgspec converts it to the type `hint`; parts of a configuration are already built."""
    value = _plain(field, value)
    classes = part_classes(hint)
    if classes:
        # msgspec would take an instance of a subclass for another type.
        try:
            fits = isinstance(value, hint)
        except TypeError:  # lists of parts, which their owner checks
            fits = True
        if not fits:
            raise ValueError(f"{field} must be {' or '.join(cls.__name__ for cls in classes)} but is {value!r}")
        return value
    try:
        return msgspec.convert(value, hint)
    except TypeError:  # an annotation of a user's class that msgspec cannot read is not checked
        return value
    except msgspec.ValidationError as error:
        text = re.sub(r"^Expected |`|, got [^ ]*", "", str(error))  # the value is shown instead
        expected, _, position = text.partition(" - at $")
        expected = expected.replace("null", "None").replace("array", "list")
        expected = re.sub(r"str matching regex '\^\((.*)\)\\+Z'", r"one of \1", expected)
        raise ValueError(f"{field}{position} must be {expected} but is {value!r}") from None


def _plain(field: str, value: Any) -> Any:
    """Lists as tuples, floats of NumPy and strings of enumerations as plain ones; NaN and sets raise ValueError."""
    if isinstance(value, (set, frozenset)):  # the order of its members changes between processes
        raise ValueError(f"{field} must be a list but is a set")
    if isinstance(value, (list, tuple)):
        return tuple(_plain(field, item) for item in value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field} must be a finite number but is {value}")
    return float(value) + 0.0 if isinstance(value, float) else value  # -0.0 as 0.0


# ---------------------------------------------------------------------------------------------------------- annotations
@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def part_classes(hint: Any) -> tuple[type, ...]:
    """The configurations that a field of type `hint` may hold, also in lists."""
    if dataclasses.is_dataclass(hint):
        return (typing.cast(type, hint),)
    classes: list[type] = []
    for member in typing.get_args(hint):
        classes += part_classes(member)
    return tuple(dict.fromkeys(classes))
