"""The fields in which runs differ, and names made from them."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.config import Run, digest, to_dict
from polyhead.config.serial import flat

FEW = 5
"""The most fields in a name; runs that differ in more fields are named by digest."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields in which runs differ, with their values.  A field is named by its last word if that is unique."""
    every = [flat(to_dict(run, semantic=True)) for run in runs]
    names = dict.fromkeys(name for one in every for name in one)
    vary = [name for name in names if len({repr(one.get(name)) for one in every}) > 1]
    short = {name: name.rpartition(".")[2] for name in vary}
    clear = {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in vary}
    return [{clear[name]: one.get(name, "") for name in vary} for one in every]


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its own if it is unique, else the fields in which runs of that name differ."""
    found = [run.name for run in runs]
    for name in dict.fromkeys(found):
        same = [i for i, run in enumerate(runs) if run.name == name]
        if len(same) == 1:
            continue
        before = "" if len(same) == len(runs) else f"{name} "
        for i, fields in zip(same, differing([runs[i] for i in same]), strict=True):
            said = words(fields) if len(fields) <= FEW else ""
            found[i] = f"{before}{said}" if said else f"{name}-{digest(runs[i])}"
    return found


def words(fields: Mapping[str, object]) -> str:
    """
    >>> words({"lr": 0.003, "seed": 1, "depth": ""})
    'lr=0.003 seed=1'
    """
    return " ".join(f"{name}={setting(value)}" for name, value in fields.items() if value != "")


def setting(value: object) -> str:
    """A setting with all its digits: Python's shortest text for the same number."""
    return value if isinstance(value, str) else repr(value)
