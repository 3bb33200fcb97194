"""What may be read off the code of a task's last token, and what a reader calls it.

A task puts its ground truth into `Batch.latents`; here it becomes one label per sequence: the terms of a fuzzy-logic
function, the rule behind the last query token of SRAVEN and the symbol to predict there.
"""

import dataclasses
from typing import Any

import numpy as np

from polyhead.analysis.capture import as_array
from polyhead.config import Batch, Classes, Task

Array = np.ndarray
Pairs = tuple[tuple[int, int], ...]


def targets(batch: Batch) -> dict[str, Array]:
    """The labels (b) that a batch offers, by name.

    Latents of whole numbers: `terms` (b k) become "term 1", "term 2", ...; (b,) keep their name.  What is known of each
    query token, `query_rules` (b m), becomes "rule", that of the last one, in place of `rules`: where a rule stands
    in a sorted multiset says nothing about a token.  Targets that are classes become "target value", the last token's.
    """
    found: dict[str, Array] = {}
    for name, value in batch.latents.items():
        if (
            value.is_floating_point()
            or value.ndim > 2
            or f"query_{name}" in batch.latents
            or "bool" in str(value.dtype)
        ):
            continue
        single = name.removeprefix("query_").removesuffix("s")
        if value.ndim == 1:
            found[name] = as_array(value)
        elif name.startswith("query_"):
            found[single] = as_array(value[:, -1])
        else:
            found |= {f"{single} {i + 1}": as_array(column) for i, column in enumerate(value.T)}
    if batch.targets.ndim == 2 and not batch.targets.is_floating_point():
        found["target value"] = as_array(batch.targets[:, -1])
    return found


def unreadable(task: Task) -> str:
    """Why nothing can be read off the code of its last token, and scored on unseen tasks; "" where it can."""
    name = task.name.replace("_", " ")
    if task.source is not None or isinstance(task.ends[1], Classes):
        return f"{name} has no token that stands for what is asked"
    if "compositional" not in task.splits:
        return f"{name} has no split of unseen combinations (compositional), only {', '.join(task.splits)}"
    return ""


def class_name(task: Task, target: str, label: int) -> str:
    """What a reader calls class `label` of `target`: the task says it."""
    return task.class_name(target, label)


def views(task: Task) -> dict[str, tuple[Task, Pairs]]:
    """The ways to look at the last token's code: by name, the task to draw from and the (query, key) pairs.

    The tokens of SRAVEN's "last_row" (the definition of the original code) belong to one feature only where nothing is
    permuted, so it is of the unpermuted task, as there; "self" is of the task as it is.

    >>> task, pairs = views(tasks.Sraven())["last_row"]
    >>> task.permuted, pairs
    (False, ((-1, 27), (-1, 31)))
    """
    return {name: (task if name == "self" else unpermuted(task), pairs) for name, pairs in task.pairs.items()}


def unpermuted(task: Task) -> Task:
    """The task with `permuted=False` where it has such a field."""
    return with_field(task, "permuted", False)


def with_field(task: Task, name: str, value: Any) -> Any:
    """The task with one field changed, or as it is if it has no such field."""
    return dataclasses.replace(task, **{name: value}) if name in {f.name for f in dataclasses.fields(task)} else task
