"""Configuration files: a run, or changes to a recipe; and groups of heads written as one word."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Mechanism, Run, Task

# ----------------------------------------------------------------------------------------------------------------- runs
SUFFIXES = (".json", ".yaml", ".yml")


def read_run(path: str, recipe: Callable[[str], Sequence["Run"]], outer: Sequence[str] = ()) -> "Run":
    """Return the run in a file.  A file with `recipe` starts from that recipe or file and lists the changed fields.

    `outer`: the files that start from this one.  Raises ValueError for a recipe of several runs, for unknown fields,
    and for a file that starts from itself.
    """
    if os.path.realpath(path) in map(os.path.realpath, outer):
        raise ValueError(f"{outer[-1]}: its recipe leads back to {path}: {' -> '.join([*outer, path])}")
    from polyhead.config import from_dict, serial, to_dict
    from polyhead.tasks import KINDS
    from polyhead.train import read_config

    changes = serial.read(path)
    if not isinstance(changes, dict) or "recipe" not in changes:
        return read_config(path)
    name = changes.pop("recipe")
    if not isinstance(name, str):
        raise ValueError(f"{path}: recipe must be a name but is {name!r}")
    runs = recipe(name)
    if len(runs) != 1:
        raise ValueError(f"{path}: {name} has {len(runs)} runs but a file is one")
    model = changes.get("model")
    if isinstance(model, dict) and isinstance(model.get("heads"), str):
        model["heads"] = [to_dict(group) for group in read_heads(model["heads"], path)]
    run = from_dict(_merge(to_dict(runs[0]), changes), KINDS, where=path)
    return fit_model(run, runs[0])


def _merge(base: object, changes: object) -> object:
    """`base` with the fields in `changes`.  An object of another kind, a list or a number replaces the old value."""
    if not isinstance(base, dict) or not isinstance(changes, dict) or changes.get("kind", base["kind"]) != base["kind"]:
        return changes
    merged = dict(base)
    for name, value in changes.items():
        merged[name] = _merge(base.get(name), value)
    return merged


# ------------------------------------------------------------------------------------------- a model that fits its task
def fit_model(run: "Run", default: "Run") -> "Run":
    """Fit inputs, outputs and lengths of the model to a changed task, unless the recipe or the user chose them."""
    from polyhead.config import AbstractorConfig, TransformerConfig

    model: Any = run.model
    default_model: Any = default.model
    # What equals the old task's value counts as chosen by nobody, so it follows the new task.
    ends = default.task.ends
    if (default_model.inputs, default_model.outputs) == ends == (model.inputs, model.outputs):
        model = replace(model, inputs=run.task.ends[0], outputs=run.task.ends[1])
    if isinstance(model, TransformerConfig) and isinstance(default_model, TransformerConfig):
        if default_model.max_length == default.task.length == model.max_length:
            model = replace(model, max_length=run.task.length)
        encoders = TransformerConfig | AbstractorConfig
        has_encoders = isinstance(model.encoder, encoders) and isinstance(default_model.encoder, encoders)
        if run.task.source is not None and has_encoders:
            encoder = _fit_encoder(model.encoder, default_model.encoder, run.task, default.task)
            model = replace(model, encoder=encoder)
    return replace(run, model=model)


def _fit_encoder(encoder: Any, default_encoder: Any, task: "Task", default_task: "Task") -> Any:
    """The same for an encoder, which reads the task's source."""
    if default_encoder.inputs == default_task.source == encoder.inputs:
        encoder = replace(encoder, inputs=task.source)
    if default_encoder.max_length == default_task.source_length == encoder.max_length:
        encoder = replace(encoder, max_length=task.source_length)
    return encoder


# ---------------------------------------------------------------------------------------------------- heads as one word
def read_heads(text: str, caller: str) -> "tuple[Mechanism, ...]":
    """Groups of heads written as one word: names of mechanisms with numbers of heads, joined by commas or "+".

    A name alone has the default number.  Raises ValueError, which begins with `caller`, for a wrong name or number.

    >>> read_heads("softmax:4,hyla:4", "x")[1].heads
    4
    """
    from polyhead.config.extensions import added, kind_of
    from polyhead.config.mechanisms import MECHANISMS

    built_in: dict[str, type[Mechanism]] = {}
    for mechanism in MECHANISMS:
        built_in[mechanism.__name__.lower()] = mechanism
    registered: dict[str, type[Mechanism]] = {}
    for registered_name, definition in added("mechanisms").items():
        registered[registered_name.lower()] = cast("type[Mechanism]", definition)
    kinds = registered | built_in
    groups = []
    for word in text.replace("+", ",").split(","):
        name, colon, count = word.strip().partition(":")
        kind = kinds[one_of(caller, "mechanism", name.lower(), kinds)]
        if name.lower() in built_in and name.lower() in registered:
            raise ValueError(f"{caller}: {name!r} is polyhead's; give {kind_of(registered[name.lower()])} another name")
        if colon and not (count.isascii() and count.isdecimal()):
            raise ValueError(f"{caller}: {word.strip()}: the number of heads must be an integer, got {count!r}")
        if colon:
            groups.append(kind(int(count)))
        else:
            groups.append(kind())
    return tuple(groups)


def print_run(run: "Run") -> None:
    """Print a run as a file for `polyhead train`, with every field that may be changed."""
    from polyhead.config import to_dict
    from polyhead.config.serial import to_yaml

    sys.stdout.write(to_yaml(to_dict(run)))
