"""Configuration files: a run, or changes to a recipe; and groups of heads written as one word."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Mechanism, Run

# ----------------------------------------------------------------------------------------------------------------- runs
SUFFIXES = (".json", ".yaml", ".yml")


def read_run(path: str, recipe: Callable[[str], Sequence["Run"]], outer: Sequence[str] = ()) -> "Run":
    """Return the run in a file.  A file with `recipe` starts from that recipe or file and lists the changed fields.

    Args:
        recipe: Returns the runs of a recipe or file by its name.
        outer: The files that start from this one.

    Raises:
        ValueError: For a recipe of several runs, for unknown fields, and for a file that starts from itself.
    """
    if os.path.realpath(path) in map(os.path.realpath, outer):
        raise ValueError(f"{outer[-1]}: its recipe leads back to {path}: {' -> '.join([*outer, path])}")
    from polyhead.config import from_dict, to_dict
    from polyhead.spec.files import read_values
    from polyhead.tasks import KINDS
    from polyhead.train import read_config

    changes = read_values(path)
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
        groups = read_heads(model["heads"], path, like=heads_of(runs[0]))
        model["heads"] = list(map(to_dict, groups))
    run = from_dict(_merge(to_dict(runs[0]), changes), KINDS, where=path)
    return fit_model(run, runs[0])


def _merge(base: object, changes: object) -> object:
    """`base` with the fields in `changes`.  An object of another kind, a list or a number replaces the old value."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    if changes.get("kind") not in (None, base.get("kind")):
        return changes
    merged = dict(base)
    for name, value in changes.items():
        merged[name] = _merge(base.get(name), value)
    return merged


# ------------------------------------------------------------------------------------------- a model that fits its task
def fit_model(run: "Run", default: "Run") -> "Run":
    """Fit inputs, outputs and lengths of the model to a changed task, unless the recipe or the user chose them."""
    old, new = default.task, run.task
    ends = {"inputs": (old.ends[0], new.ends[0]), "outputs": (old.ends[1], new.ends[1])}
    model = _follow(run.model, default.model, {**ends, "max_length": (old.length, new.length)})
    # An encoder reads the task's source.
    encoder, default_encoder = getattr(model, "encoder", None), getattr(default.model, "encoder", None)
    if new.source is not None and encoder is not None and default_encoder is not None:
        values = {"inputs": (old.source, new.source), "max_length": (old.source_length, new.source_length)}
        model = replace(model, encoder=_follow(encoder, default_encoder, values))
    return replace(run, model=model)


def _follow(model: Any, default: Any, values: dict[str, tuple[Any, Any]]) -> Any:
    """The model with the new value of each field that has the old one: nobody chose it.  `values`: (old, new)."""
    changes = {}
    for name, (old, new) in values.items():
        if hasattr(model, name) and getattr(model, name) == getattr(default, name, None) == old:
            changes[name] = new
    return replace(model, **changes)


# ---------------------------------------------------------------------------------------------------- heads as one word
def heads_of(run: "Run") -> "list[Mechanism]":
    """The groups of all layers of a run's model; none for a model of another kind than a transformer."""
    from polyhead.config import TransformerConfig

    if isinstance(run.model, TransformerConfig):
        return run.model.groups()
    return []


def read_heads(text: str, caller: str, like: "Sequence[Mechanism]" = ()) -> "tuple[Mechanism, ...]":
    """Groups of heads written as one word: names of mechanisms with numbers of heads, joined by commas or "+".

    A name alone has the default number.

    >>> read_heads("softmax:4,hyla:4", "x")[1].heads
    4

    Args:
        like: Where all these groups agree on a field of `COMMON_FIELDS`, the new groups keep its value.

    Raises:
        ValueError: For a wrong name or number; the message begins with `caller`.
    """
    from polyhead.config.mechanisms import COMMON_FIELDS, MECHANISMS
    from polyhead.extensions import with_added

    common = {}  # the fields on which all groups in `like` agree, and their values
    for field in COMMON_FIELDS:
        values = {getattr(group, field) for group in like if hasattr(group, field)}
        if len(values) == 1:
            common[field] = values.pop()
    mechanisms = with_added("mechanisms", {kind.__name__: kind for kind in MECHANISMS}, caller)
    kinds: dict[str, type[Mechanism]] = {name.lower(): kind for name, kind in mechanisms.items()}
    groups = []
    for word in text.replace("+", ",").split(","):
        name, colon, count = word.strip().partition(":")
        mechanism = kinds[one_of(caller, "mechanism", name.lower(), kinds)]
        options: dict[str, Any] = {}
        if colon:
            if not (count.isascii() and count.isdecimal()):
                raise ValueError(f"{caller}: {word.strip()}: the number of heads must be an integer, got {count!r}")
            options["heads"] = int(count)
        try:
            group = mechanism(**options)
        except TypeError as error:  # a user's mechanism with a field that has no default
            raise ValueError(f"{caller}: {word.strip()}: {error}; give these heads in a file") from error
        changes = {}
        for field, value in common.items():
            if hasattr(group, field):
                changes[field] = value
        groups.append(replace(group, **changes))
    return tuple(groups)
