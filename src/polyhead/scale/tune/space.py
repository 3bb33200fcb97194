"""The space of a search: ranges and lists of values for the fields of a run, as on the command line.

LOW:HIGH is a range, LOW:HIGH:log a range with logarithmic scale, and A,B,C is a list of values.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.serial import flat
from polyhead.tasks import KINDS

Value = bool | int | float | str | None
SCALARS: tuple[Any, ...] = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both are."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Value, ...]


Space = dict[str, Range | Choice]


def is_space(text: str, kinds: Sequence[type]) -> bool:
    """Whether a command-line word has more than one value; a string may contain a colon (`cuda:1`)."""
    return "," in text or (":" in text and str not in kinds)


def read_space(run: Run, given: Mapping[str, str]) -> Space:
    """The space that `given` describes: {"train.lr": "1e-4:1e-2:log", "model.dim": "32,64"}.

    Raises ValueError for an unknown field, one that a search may not change, and a malformed range.
    """
    if not given:
        raise ValueError("tune: nothing to choose: give a field a range (1e-4:1e-2:log) or a list (32,64,128)")
    space: Space = {}
    for name, text in given.items():
        space[name] = _read(name, text, kinds_of(run, name))
        _check(run, name, space[name])
    return space


def kinds_of(run: Run, name: str) -> list[type]:
    """The searchable types of the field with this dotted name; empty for other fields."""
    names = [known for known in flat(configs.to_dict(run)) if not known.endswith(".kind")]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise ValueError(f"tune: unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    *path, last = name.split(".")
    owner: Any = run
    for part in path:
        owner = owner[int(part)] if part.isdecimal() else getattr(owner, part)
    hint = typing.get_type_hints(type(owner)).get(last) if dataclasses.is_dataclass(owner) else None
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind in SCALARS]


def changed(run: Run, values: Mapping[str, Value]) -> Run:
    """`run` with these fields, by dotted name.  Raises ValueError for incompatible values."""
    data = configs.to_dict(run)
    for name, value in values.items():
        *path, last = name.split(".")
        owner = data
        for part in path:
            owner = owner[int(part)] if part.isdecimal() else owner[part]
        owner[last] = value
    found: Run = configs.from_dict(data, KINDS, where="tune")
    return found


def words(run: Run, values: Mapping[str, Value]) -> list[str]:
    """These fields of `run` as arguments of the command line.

    >>> from polyhead.papers.recipes import RECIPES
    >>> words(RECIPES["fuzzy-hyla"](), {"train.lr": 0.01, "model.causal": True, "model.bias": False})
    ['--train.lr', '0.01', '--model.causal', '--model.no-bias']
    """
    found: list[str] = []
    for name, value in values.items():
        path, dot, last = name.rpartition(".")
        if kinds_of(run, name) == [bool]:  # a flag, which takes no value
            found.append(f"--{path}{dot}{'' if value else 'no-'}{last}")
        else:
            found += [f"--{name}", str(value)]
    return found


def _read(name: str, text: str, kinds: Sequence[type]) -> Range | Choice:
    who = f"tune: {name}"
    if not kinds:
        raise ValueError(f"{who} is no number, string or truth value: no search can choose it")
    _refuse(name)
    if "," in text:
        values = tuple(_value(who, part.strip(), kinds) for part in text.split(","))
        if len(set(values)) < len(values):
            raise ValueError(f"{who}: {text!r} names a value twice")
        return Choice(values)
    ends, log = text.removesuffix(":log").split(":"), text.endswith(":log")
    if len(ends) != 2 or not {int, float} & set(kinds):
        raise ValueError(f"{who}: {text!r} is no range LOW:HIGH or LOW:HIGH:log and no list A,B,C")
    numbers = [kind for kind in kinds if kind in (int, float)]
    low, high = (_value(who, end, numbers) for end in ends)
    assert isinstance(low, (int, float))
    assert isinstance(high, (int, float))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{who}: a range has ends but {text!r} came")
    if low >= high:
        raise ValueError(f"{who}: the lower end of a range comes first, and below the other, but {text!r} came")
    if log and low <= 0:
        raise ValueError(f"{who}: a logarithmic range begins above 0 but {text!r} came")
    return Range(low, high, log)


def _value(who: str, text: str, kinds: Sequence[type]) -> Value:
    """The text as the first type that accepts it, from the narrowest type on."""
    if type(None) in kinds and text == "None":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in kinds and text:
            try:
                return kind(text) if kind is not int or float not in kinds else float(text)
            except ValueError:
                continue
    names = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}
    raise ValueError(f"{who} must be {' or '.join(names[kind] for kind in kinds)} but {text!r} came")


def _refuse(name: str) -> None:
    """Raise a ValueError for a field that a search may not change."""
    if name.startswith("task."):
        raise ValueError(f"tune: {name} is part of the question: scores of different tasks cannot be compared")
    if name == "seed":
        raise ValueError("tune: seed is no setting: the best of many seeds is luck; sweep them instead")


def _check(run: Run, name: str, part: Range | Choice) -> None:
    """Raise a ValueError for a field without an effect, and for values that are invalid with any other choice."""
    values: tuple[Value, ...] = part.values if isinstance(part, Choice) else (part.low, part.high)
    runs: list[Run] = []
    for value in values:
        try:
            runs.append(changed(run, {name: value}))
        except ValueError as error:  # a number may become valid when another field also changes
            if isinstance(value, str) or (value == values[-1] and not runs):
                raise ValueError(str(error).replace("tune:", f"tune: {name}={value}:", 1)) from None
    if len({configs.digest(one) for one in runs}) < len(runs):
        raise ValueError(f"tune: {name} cannot change a result, so there is nothing to choose")
