"""Configuration files: a run, or changes to a recipe; and groups of heads written as one word."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Mechanism, Run, Task

SUFFIXES = (".json", ".yaml", ".yml")


def read(path: str, recipe: Callable[[str], Sequence["Run"]], within: Sequence[str] = ()) -> "Run":
    """The run in a file.  A file with `recipe` starts from that recipe and lists the changed fields.

    `within`: the files that start from this one, the first first.  Raises ValueError for a recipe of several runs, for
    unknown fields, and for a file that starts from itself.
    """
    if os.path.realpath(path) in map(os.path.realpath, within):
        raise ValueError(f"{within[-1]}: its recipe leads back to {path}: {' -> '.join([*within, path])}")
    from polyhead.config import from_dict, serial
    from polyhead.tasks import KINDS
    from polyhead.train import read_config

    given = serial.read(path)
    if not isinstance(given, dict) or "recipe" not in given:
        return read_config(path)
    name = given.pop("recipe")
    if not isinstance(name, str):
        raise ValueError(f"{path}: recipe must be a name but is {name!r}")
    runs = recipe(name)
    if len(runs) != 1:
        raise ValueError(f"{path}: {name} has {len(runs)} runs but a file is one")
    model = given.get("model")
    if isinstance(model, dict) and isinstance(model.get("heads"), str):
        model["heads"] = [serial.to_dict(group) for group in heads(model["heads"], path)]
    found = from_dict(_changed(serial.to_dict(runs[0]), given), KINDS, where=path)
    assert type(found) is type(runs[0])
    return fitted(found, runs[0])


def fitted(run: "Run", default: "Run") -> "Run":
    """Fit inputs and outputs of the model to a changed task, unless the recipe or the user chose them."""
    from polyhead.config import AbstractorConfig, TransformerConfig

    model: Any = run.model
    before: Any = default.model
    if (before.inputs, before.outputs) == default.task.ends and (model.inputs, model.outputs) == default.task.ends:
        model = replace(model, inputs=run.task.ends[0], outputs=run.task.ends[1])
    if isinstance(model, TransformerConfig) and isinstance(before, TransformerConfig):
        if before.max_length == default.task.length and model.max_length == before.max_length:
            model = replace(model, max_length=run.task.length)
        encoders = TransformerConfig | AbstractorConfig
        if run.task.source is not None and all(isinstance(x.encoder, encoders) for x in (model, before)):
            model = replace(model, encoder=_fitted_encoder(model.encoder, before.encoder, run.task, default.task))
    return replace(run, model=model)


def _fitted_encoder(model: Any, before: Any, task: "Task", default: "Task") -> Any:
    """The same for an encoder, which reads the task's source."""
    if before.inputs == default.source == model.inputs:
        model = replace(model, inputs=task.source)
    if before.max_length == default.source_length == model.max_length:
        model = replace(model, max_length=task.source_length)
    return model


def _changed(base: object, given: object) -> object:
    """`base` with the fields in `given`.  An object of another kind, a list or a number replaces the old value."""
    if not isinstance(base, dict) or not isinstance(given, dict) or given.get("kind", base["kind"]) != base["kind"]:
        return given
    return {**base, **{name: _changed(base.get(name), one) for name, one in given.items()}}


def heads(text: str, who: str) -> "tuple[Mechanism, ...]":
    """Groups of heads written as one word: names of mechanisms with numbers of heads, joined by commas or "+".

    A name alone has the default number.  Raises ValueError, with `who` first, for an unknown name and a wrong number.

    >>> heads("softmax:4,hyla:4", "x")[1].heads
    4
    """
    from polyhead.config.extensions import added, kind_of
    from polyhead.config.mechanisms import MECHANISMS

    ours = {kind.__name__.lower(): kind for kind in MECHANISMS}
    theirs = {name.lower(): cast("type[Mechanism]", kind) for name, kind in added("mechanisms").items()}
    known = theirs | ours
    found = []
    for word in text.replace("+", ",").split(","):
        name, colon, count = word.strip().partition(":")
        kind = known[one_of(who, "mechanism", name.lower(), known)]
        if kind in MECHANISMS and name.lower() in theirs:
            raise ValueError(f"{who}: {name!r} is polyhead's; give {kind_of(theirs[name.lower()])} another name")
        if colon and not count.isdecimal():
            raise ValueError(f"{who}: {word.strip()}: a number of heads was wanted but {count!r} came")
        found.append(kind(int(count)) if colon else kind())
    return tuple(found)


def write(run: "Run") -> None:
    """Print a run as a file for `polyhead train`, with every field that may be changed."""
    import yaml

    from polyhead.config import to_dict

    yaml.safe_dump(to_dict(run), sys.stdout, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
