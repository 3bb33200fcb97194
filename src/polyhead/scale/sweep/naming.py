"""The fields in which runs differ, and names made from them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.config import Run, TransformerConfig, digest, to_dict
from polyhead.spec.values import flat

MAX_FIELDS = 5
"""Runs that differ in more fields are named by digest."""

COLUMNS = ("run", "state", "step", "parameters", "seconds", "folder")
"""Columns of a table of runs beside their settings."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the fields in which runs differ, with their values.

    A field is named by its last word if no other field and no column is.

    Heads of different kinds or numbers are one field, heads=softmax:4+hyla:4, beside their options other than defaults.
    """
    # Heads are one field only if all runs have some: other models have "".
    texts = set(map(heads_text, runs))
    heads_differ = len(texts) > 1 and "" not in texts
    fields_of_runs = []
    for run in runs:
        fields = flat(to_dict(run, semantic=True))
        if heads_differ:
            fields = with_heads(run, fields)
        fields_of_runs.append(fields)

    varying: dict[str, str] = {}  # name -> its last word; or the name itself, if others end with the same word
    for name in dict.fromkeys(itertools.chain(*fields_of_runs)):
        values = {repr(fields.get(name)) for fields in fields_of_runs}
        if len(values) > 1:
            varying[name] = name.rpartition(".")[2]
    words_of_names = list(varying.values())
    for name, word in varying.items():
        if words_of_names.count(word) > 1 or word in COLUMNS:
            varying[name] = name
    rows = []
    for fields in fields_of_runs:
        rows.append({word: fields.get(name, "") for name, word in varying.items()})
    return rows


def with_heads(run: Run, fields: Mapping[str, object]) -> dict[str, object]:
    """Return `fields` with the heads in one word in place of their kinds, numbers and defaults."""
    left_out: set[str] = set()
    for path, group in groups_of(run).items():
        left_out.add(f"{path}.kind")
        for field in dataclasses.fields(group):
            if field.name == "heads" or getattr(group, field.name) == field.default:
                left_out.add(f"{path}.{field.name}")
    left_out_prefixes = tuple(f"{name}." for name in left_out)
    short: dict[str, object] = {}
    for name, value in fields.items():
        if name.startswith("model.heads."):
            short["model.heads"] = heads_text(run)
        if name not in left_out and not name.startswith(left_out_prefixes):
            short[name] = value
    return short


def heads_text(run: Run) -> str:
    """Return "softmax:4+hyla:4" for Softmax(4), Hyla(4); layers are separated by strokes; "" without heads."""
    groups_by_layer: dict[str, list[str]] = {}
    for path, group in groups_of(run).items():
        groups_by_layer.setdefault(path.rpartition(".")[0], []).append(f"{type(group).__name__.lower()}:{group.heads}")
    return "/".join(map("+".join, groups_by_layer.values()))


def groups_of(run: Run) -> dict[str, Any]:
    """Return the groups of heads of a transformer by dotted name."""
    model = run.model
    if not isinstance(model, TransformerConfig):
        return {}
    lists = {"model.heads": model.layer_heads(0)}
    if model.per_layer:
        lists = {f"model.heads.{layer}": model.layer_heads(layer) for layer in range(model.layers)}
    groups = {}
    for path, heads in lists.items():
        for index, group in enumerate(heads):
            groups[f"{path}.{index}"] = group
    return groups


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its own if it is unique, else the fields in which runs of that name differ."""
    indices_by_name: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        indices_by_name.setdefault(run.name, []).append(index)
    names = [run.name for run in runs]
    for name, indices in indices_by_name.items():
        if len(indices) == 1:
            continue
        namesakes = [runs[index] for index in indices]
        for index, run, fields in zip(indices, namesakes, differing(namesakes), strict=True):
            text = words(fields)  # empty if the run has none of the fields that differ
            if not text or len(fields) > MAX_FIELDS:
                names[index] = f"{name}-{digest(run)}"
            elif len(indices) < len(runs):
                names[index] = f"{name} {text}"
            else:
                names[index] = text
    return names


def words(fields: Mapping[str, object]) -> str:
    """Return the fields as text, without empty ones: lr=0.003 seed=1."""
    texts = []
    for name, value in fields.items():
        if value != "":
            texts.append(f"{name}={setting(value)}")
    return " ".join(texts)


def setting(value: object) -> str:
    """Return a setting with all its digits: Python's shortest text for the same number."""
    if isinstance(value, str):
        return value
    return repr(value)
