"""The fields in which runs differ, and names made from them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyhead.config import Mechanism, Run, TransformerConfig, digest, to_dict
from polyhead.config.serial import flat

FEW = 5
"""The most fields in a name; runs that differ in more fields are named by digest."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields in which runs differ, with their values.  A field is named by its last word if that is unique.

    Heads of different kinds or numbers are one field, heads=softmax:4+hyla:4, beside their options other than defaults.
    """
    every = [flat(to_dict(run, semantic=True)) for run in runs]
    if len({_heads(run) for run in runs}) > 1 and all(isinstance(run.model, TransformerConfig) for run in runs):
        every = [_with_heads(run, fields) for run, fields in zip(runs, every, strict=True)]
    names = dict.fromkeys(name for one in every for name in one)
    vary = [name for name in names if len({repr(one.get(name)) for one in every}) > 1]
    short = {name: name.rpartition(".")[2] for name in vary}
    clear = {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in vary}
    return [{clear[name]: one.get(name, "") for name in vary} for one in every]


def _with_heads(run: Run, fields: Mapping[str, object]) -> dict[str, object]:
    """`fields`, with the heads in one word in place of their kinds, numbers and defaults."""
    usual = {
        f"{place}.{field.name}"
        for place, group in _groups(run)
        for field in dataclasses.fields(group)
        if field.name == "heads" or getattr(group, field.name) == field.default
    } | {f"{place}.kind" for place, _ in _groups(run)}
    found: dict[str, object] = {}
    for name, value in fields.items():
        if name.startswith("model.heads."):
            found["model.heads"] = _heads(run)
        if name not in usual and not any(name.startswith(f"{one}.") for one in usual):
            found[name] = value
    return found


def _heads(run: Run) -> str:
    """Softmax(4), Hyla(4) -> "softmax:4+hyla:4", by layer with a stroke between; "" for a model without heads."""
    by_layer: dict[str, list[str]] = {}
    for place, group in _groups(run):
        by_layer.setdefault(place.rpartition(".")[0], []).append(f"{type(group).__name__.lower()}:{group.heads}")
    return "/".join("+".join(groups) for groups in by_layer.values())


def _groups(run: Run) -> Iterator[tuple[str, Mechanism]]:
    """The groups of heads of a transformer, each with its dotted name."""
    model = run.model
    if not isinstance(model, TransformerConfig):
        return
    for layer in range(model.layers if model.per_layer else 1):
        place = f"model.heads.{layer}" if model.per_layer else "model.heads"
        yield from ((f"{place}.{i}", group) for i, group in enumerate(model.layer_heads(layer)))


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
