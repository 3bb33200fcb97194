"""The base class of configurations: it checks types, choices and bounds of the fields in the constructor."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from polyhead.spec.shapes import check_number, one_of

LARGEST_BITS = 63
"""Integers of more bits are neither a size nor a seed."""

WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}


def non_semantic(default: Any) -> Any:
    """A field that cannot change the result of a run; it is omitted from the digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"digest": "never"})


def omitted_at_default(default: Any) -> Any:
    """A field that enters the digest only with another value, so that runs from before it existed keep their digest."""
    return dataclasses.field(default=default, kw_only=True, metadata={"digest": "unless default"})


class Checked:
    """Base of frozen dataclasses: checks fields that are Booleans, numbers or strings.

    The constructor raises ValueError for a value of another type, for NaN and infinite numbers, and for values that the
    tables of the class or of its bases exclude: `_choices` lists the names that a field may have, `_least` and `_most`
    the bounds of a number.  None passes where the type allows it.  Lists become tuples, and integers in fields of
    numbers become floats, so that a configuration equals what is read from its file.
    """

    _choices: ClassVar[Mapping[str, Iterable[str]]] = {}
    _least: ClassVar[Mapping[str, int]] = {}
    _most: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        kind: Any = type(self)
        hints = type_hints(kind)
        for field in dataclasses.fields(kind):
            value = as_field_value(getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
            _check_type(f"{kind.__name__}: {field.name}", value, hints[field.name])
            if isinstance(value, float):
                check_number(kind.__name__, field.name, value)
        for base in reversed(kind.__mro__):
            self._check_tables(base)

    def _check_tables(self, base: Any) -> None:
        """Compare the fields with the tables that one class defines."""
        name = type(self).__name__
        tables = vars(base)
        for field, choices in tables.get("_choices", {}).items():
            if getattr(self, field) is not None:
                one_of(name, field, getattr(self, field), choices)
        for field, smallest in tables.get("_least", {}).items():
            if getattr(self, field) is not None:
                check_number(name, field, getattr(self, field), smallest)
        for field, largest in tables.get("_most", {}).items():
            value = getattr(self, field)
            if value is not None and value > largest:
                raise ValueError(f"{name}: {field} must be at most {largest} but is {value}")


def _check_type(field_name: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a field for plain values or for a tuple has a value of another type."""
    options = union_members(hint)
    if isinstance(value, str) and any(typing.get_origin(option) is tuple for option in options):
        raise ValueError(f"{field_name} must be a list but is {value!r}")
    if not WORDS.keys() >= set(options):
        return
    # A Boolean is an integer to Python, but not to a reader of a configuration.
    is_allowed = isinstance(value, options) and (not isinstance(value, bool) or bool in options)
    if not is_allowed:
        words = " or ".join(WORDS[option] for option in options)
        raise ValueError(f"{field_name} must be {words} but is {value!r}")
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError(f"{field_name} must have at most {LARGEST_BITS} bits but has {value.bit_length()}")


def as_field_value(value: Any, hint: Any) -> Any:
    """`value` with lists as tuples, and with integers as floats where the type is float."""
    options = union_members(hint)
    if type(value) is int and float in options and int not in options and value.bit_length() <= LARGEST_BITS:
        return float(value)
    tuples = [option for option in options if typing.get_origin(option) is tuple]
    if isinstance(value, (list, tuple)) and tuples:
        hints = element_hints(tuples[0], len(value))
        if len(hints) == len(value):
            return tuple(as_field_value(*pair) for pair in zip(value, hints, strict=True))
        return tuple(value)
    return value


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    return typing.get_type_hints(cls)


def union_members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; for any other type, the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def element_hints(hint: Any, count: int) -> tuple[Any, ...]:
    """The types in a tuple or sequence that holds `count` values, unless its own number is fixed."""
    hints = typing.get_args(hint)
    is_fixed = typing.get_origin(hint) is tuple and hints[-1] is not ...
    return hints if is_fixed else hints[:1] * count
