"""Trained models that come with polyhead.  The package has their index; the files are in `models/` of the repository.

    run, model = ph.load("fuzzy-hyla")        the first seed; "fuzzy-hyla-2" is another
    polyhead list models

Each model is a run folder, so every command that takes a folder also takes its name, such as
`polyhead eval fuzzy-hyla`.  Missing files are downloaded once.  Every file must have the SHA-256 of the index.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import urllib.error
from typing import TypedDict

from polyhead.spec.home import cache
from polyhead.train.store.files import Damaged, one_line

INDEX = pathlib.Path(__file__).with_name("models.json")
REPOSITORY = pathlib.Path(__file__).parents[4] / "models"
"""The folder of the files in a source tree."""
SOURCE = "https://github.com/polyhead/polyhead/raw/main/models"
OWN = "POLYHEAD_MODELS"
"""This environment variable names another folder of models."""


class Model(TypedDict):
    """The index entry of a model.

    `scores`: mean and standard error on each split of its card.  `sample`: the same on the first `sampled` sequences,
    for tests.  `text`: the fingerprint of a task's text, or None.  `files`: the SHA-256 of each file.
    """

    task: str
    digest: str
    steps: int
    seed: int
    parameters: int
    metric: str
    scores: dict[str, list[float]]
    sampled: int
    sample: dict[str, float]
    text: str | None
    bytes: int
    files: dict[str, str]


@functools.cache
def models() -> dict[str, Model]:
    """The models of the index, by name."""
    found: dict[str, Model] = json.loads(INDEX.read_text(encoding="utf-8"))
    return found


def named(name: str) -> str | None:
    """The model of that name in the index, or None; a name without a seed means the lowest seed."""
    if name in models():
        return name
    seeds = [int(one.rpartition("-")[2]) for one in models() if re.fullmatch(rf"{re.escape(name)}-\d+", one)]
    return f"{name}-{min(seeds)}" if seeds else None


def hint(name: str) -> str:
    """A suggestion for an unknown name: the most similar model."""
    near = difflib.get_close_matches(name, models(), n=1)
    return f" (did you mean the trained model {near[0]!r}? polyhead list models)" if near else ""


def at_hand(name: str) -> pathlib.Path | None:
    """The local folder of a model, or None."""
    files = models()[name]["files"]
    return next((place / name for place in _places() if all((place / name / file).is_file() for file in files)), None)


def folder(name: str) -> pathlib.Path:
    """The run folder of a model of the index, downloaded if it is missing, with verified files.

    Raises Damaged for a file with another digest, and ValueError if the model is missing and cannot be downloaded.
    """
    found = at_hand(name) or _download(name)
    for file, digest in models()[name]["files"].items():
        if hashlib.sha256((found / file).read_bytes()).hexdigest() != digest:
            raise Damaged(f"{found / file} is damaged: it is not the file that was published as {name}")
    return found


def _kept() -> pathlib.Path:
    return cache("models", OWN)


def _places() -> list[pathlib.Path]:
    own = os.environ.get(OWN)
    found = [*([pathlib.Path(own)] if own else []), REPOSITORY]
    with contextlib.suppress(RuntimeError):  # without a home folder nothing is kept
        found.append(_kept())
    return found


def _download(name: str) -> pathlib.Path:
    from torch.hub import download_url_to_file

    try:
        into, source = _kept() / name, f"{SOURCE}/{name}"
    except RuntimeError as error:
        raise ValueError(f"load: {name} is not here and there is no folder to download it to: {error}") from None
    try:
        into.mkdir(parents=True, exist_ok=True)
        for file, digest in models()[name]["files"].items():
            download_url_to_file(f"{source}/{file}", str(into / file), digest, progress=sys.stderr.isatty())
    except (OSError, urllib.error.URLError, RuntimeError) as error:
        advice = f"with the folder {name} in {_kept()}, or in the folder that {OWN} names, nothing is downloaded"
        said = f"load: {name} is not here and {source} could not be downloaded ({one_line(error)})"
        raise ValueError(f"{said}; {advice}") from None
    return into
