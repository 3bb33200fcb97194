"""Labels that a probe may predict from the code of a task's last token: the ground truth in `Batch.latents`."""

import dataclasses
from typing import Any

import numpy as np
import torch

from polyhead.analysis.capture import as_array
from polyhead.config import Classes
from polyhead.tasks.base import Batch, Task

Array = np.ndarray
Pairs = tuple[tuple[int, int], ...]


# Names of mechanisms in figures and tables that are not their kind with a capital letter.
LABELS = {"hyla": "HYLA"}


def mechanism_label(kind: str) -> str:
    """The name of a mechanism in figures and tables, from its kind: "softmax", "hyla", "relational", ...

    >>> mechanism_label("hyla"), mechanism_label("relational")
    ('HYLA', 'Relational')
    """
    return LABELS.get(kind, kind.capitalize())


def targets(batch: Batch) -> dict[str, Array]:
    """The labels (b) of a batch, by name.

    Only integer latents are labels.  `terms` (b k) becomes "term 1", "term 2", ...; a latent (b,) keeps its name.
    `query_rules` (b m) becomes "rule", the rule of the last token.  It replaces `rules`, whose order in a sorted
    multiset carries no information about a token.  An integer target of the last token becomes "target value".
    """
    labels: dict[str, Array] = {}
    for name, value in batch.latents.items():
        is_integer = not value.is_floating_point() and value.dtype != torch.bool
        if not is_integer or value.ndim > 2 or f"query_{name}" in batch.latents:
            continue
        singular = name.removeprefix("query_").removesuffix("s")
        if value.ndim == 1:
            labels[name] = as_array(value)
        elif name.startswith("query_"):
            labels[singular] = as_array(value[:, -1])
        else:
            for i, column in enumerate(value.T):
                labels[f"{singular} {i + 1}"] = as_array(column)
    if batch.targets.ndim == 2 and not batch.targets.is_floating_point():
        labels["target value"] = as_array(batch.targets[:, -1])
    return labels


def distinct(batch: Batch) -> Array:
    """The indices of sequences whose inputs differ from those of all earlier ones.

    A small task repeats its sequences.  Copies have the same code and labels: in a test set they are no new evidence.
    """
    parts = []
    for array in (batch.inputs, batch.source, batch.mask):
        if array is not None:
            parts.append(as_array(array.flatten(1)).astype(float))
    _, first_indices = np.unique(np.concatenate(parts, axis=1), axis=0, return_index=True)
    return np.sort(first_indices)


def unreadable(task: Task) -> str:
    """Why no probe of the last token's code can be scored on unseen tasks; "" if one can."""
    name = task.name.replace("_", " ")
    _, outputs = task.ends
    if task.source is not None or isinstance(outputs, Classes):
        return f"{name} has no token that stands for what is asked"
    if "compositional" not in task.splits:
        return f"{name} has no split compositional, only {', '.join(task.splits)}"
    return ""


def views(task: Task) -> dict[str, tuple[Task, Pairs]]:
    """The views of the last token's code: name -> the task to draw from, and the (query, key) pairs.

    "self" uses the task unchanged.  SRAVEN's "last_row" (the definition of the original code) uses the task without
    permutation, because only then do its tokens belong to one feature.

    >>> task, pairs = views(tasks.Sraven())["last_row"]
    >>> task.permuted, pairs
    (False, ((-1, 27), (-1, 31)))
    """
    unpermuted = with_field(task, "permuted", False)
    task_and_pairs = {}
    for name, pairs in task.pairs.items():
        task_and_pairs[name] = (task if name == "self" else unpermuted, pairs)
    return task_and_pairs


def with_field(task: Task, name: str, value: Any) -> Any:
    """The task with one field changed, or unchanged if it does not have the field."""
    if name not in task.__dataclass_fields__:
        return task
    return dataclasses.replace(task, **{name: value})
