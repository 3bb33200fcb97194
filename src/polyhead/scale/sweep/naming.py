"""The fields in which runs differ, and names made from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.config import Run, TransformerConfig, digest, to_dict
from polyhead.config.serial import flat

MAX_FIELDS = 5
"""Runs that differ in more fields are named by digest."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the fields in which runs differ, with their values.  A field is named by its last word if it is unique.

    Heads of different kinds or numbers are one field, heads=softmax:4+hyla:4, beside their options other than defaults.
    """
    fields_of_runs = [flat(to_dict(run, semantic=True)) for run in runs]
    if len({heads_text(run) for run in runs}) > 1 and all(isinstance(run.model, TransformerConfig) for run in runs):
        fields_of_runs = [with_heads(run, fields) for run, fields in zip(runs, fields_of_runs, strict=True)]
    names: dict[str, None] = {}
    for fields in fields_of_runs:
        names |= dict.fromkeys(fields)
    varying = []
    for name in names:
        if len({repr(fields.get(name)) for fields in fields_of_runs}) > 1:
            varying.append(name)
    last_words = [name.rpartition(".")[2] for name in varying]
    short_names = {}
    for name, word in zip(varying, last_words, strict=True):
        short_names[name] = word if last_words.count(word) == 1 else name
    return [{short_names[name]: fields.get(name, "") for name in varying} for fields in fields_of_runs]


def with_heads(run: Run, fields: Mapping[str, object]) -> dict[str, object]:
    """Return `fields` with the heads in one word in place of their kinds, numbers and defaults."""
    left_out: set[str] = set()
    for place, group in groups_of(run).items():
        left_out.add(f"{place}.kind")
        for field in dataclasses.fields(group):
            if field.name == "heads" or getattr(group, field.name) == field.default:
                left_out.add(f"{place}.{field.name}")
    short: dict[str, object] = {}
    for name, value in fields.items():
        if name.startswith("model.heads."):
            short["model.heads"] = heads_text(run)
        if name not in left_out and not any(name.startswith(f"{prefix}.") for prefix in left_out):
            short[name] = value
    return short


def heads_text(run: Run) -> str:
    """Return "softmax:4+hyla:4" for Softmax(4), Hyla(4); layers are separated by strokes; "" without heads."""
    groups_by_layer: dict[str, list[str]] = {}
    for place, group in groups_of(run).items():
        groups_by_layer.setdefault(place.rpartition(".")[0], []).append(f"{type(group).__name__.lower()}:{group.heads}")
    return "/".join("+".join(groups) for groups in groups_by_layer.values())


def groups_of(run: Run) -> dict[str, Any]:
    """Return the groups of heads of a transformer by dotted name."""
    model = run.model
    if not isinstance(model, TransformerConfig):
        return {}
    groups = {}
    for layer in range(model.layers if model.per_layer else 1):
        prefix = f"model.heads.{layer}" if model.per_layer else "model.heads"
        for index, group in enumerate(model.layer_heads(layer)):
            groups[f"{prefix}.{index}"] = group
    return groups


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its own if it is unique, else the fields in which runs of that name differ."""
    names = [run.name for run in runs]
    unique = list(names)
    for name in dict.fromkeys(names):
        indices = [index for index, other in enumerate(names) if other == name]
        if len(indices) == 1:
            continue
        prefix = "" if len(indices) == len(runs) else f"{name} "
        for index, fields in zip(indices, differing([runs[index] for index in indices]), strict=True):
            text = words(fields) if len(fields) <= MAX_FIELDS else ""
            unique[index] = f"{prefix}{text}" if text else f"{name}-{digest(runs[index])}"
    return unique


def words(fields: Mapping[str, object]) -> str:
    """Return the fields as text, without empty ones.

    >>> words({"lr": 0.003, "seed": 1, "depth": ""})
    'lr=0.003 seed=1'
    """
    return " ".join(f"{name}={setting(value)}" for name, value in fields.items() if value != "")


def setting(value: object) -> str:
    """Return a setting with all its digits: Python's shortest text for the same number."""
    return value if isinstance(value, str) else repr(value)
