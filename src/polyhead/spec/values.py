"""JSON values: configurations by dotted names, and scores that may be NaN."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def flat(values: object, prefix: str = "") -> dict[str, object]:
    """What `to_dict` gives, by the dotted names by which reports and sweeps compare runs.

    >>> flat({"train": {"lr": 0.1, "betas": [0.9, 0.99]}, "heads": [{"heads": 2}]})
    {'train.lr': 0.1, 'train.betas': [0.9, 0.99], 'heads.0.heads': 2}
    """
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(values, dict):
        pairs = values.items()
    elif isinstance(values, list) and any(isinstance(value, (dict, list)) for value in values):
        pairs = enumerate(values)
    else:
        return {prefix: values}
    names: dict[str, object] = {}
    for name, value in pairs:
        names |= flat(value, f"{prefix}.{name}".removeprefix("."))
    return names


def legal(value: object) -> object:
    """`value` with null for NaN and infinite, which JSON does not have."""
    if isinstance(value, dict):
        return {str(name): legal(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [legal(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def numbers(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `legal` for a table of scores: null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in scores.items()}


def one_line(error: object) -> str:
    """The text of an error of another library, in one line."""
    return " ".join(str(error).split())
