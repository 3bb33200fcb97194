"""Trained models that come with polyhead.  The package has their index; the files are in `models/` of the repository.

    run, model = ph.load("fuzzy-hyla")        the lowest seed; "fuzzy-hyla-2" is another
    polyhead list models

Each model is a run folder, so every command that takes a folder also takes its name, such as
`polyhead eval fuzzy-hyla`.  Missing files are downloaded once and checked against the index.
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

from polyhead.spec.home import cache
from polyhead.train.store.files import Damaged, one_line

INDEX = pathlib.Path(__file__).with_name("models.json")
"""By name: the digest of the run, and the SHA-256 of its `FILES` one after another."""
FILES = ("checkpoint.safetensors", "config.json", "metrics.jsonl", "result.json")
REPOSITORY = pathlib.Path(__file__).parents[4] / "models"
"""The folder of the files in a source tree."""
SOURCE = "https://github.com/polyhead/polyhead/raw/main/models"
OWN = "POLYHEAD_MODELS"
"""This environment variable names another folder of models."""


@functools.cache
def models() -> dict[str, dict[str, str]]:
    """The models of the index by name: `digest` of the run, and `sha256` of the files."""
    index: dict[str, dict[str, str]] = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def named(name: str) -> str | None:
    """The model of that name in the index, or None; a name without a seed means the lowest seed."""
    if name in models():
        return name
    seeds = [int(model.rpartition("-")[2]) for model in models() if re.fullmatch(rf"{re.escape(name)}-\d+", model)]
    if not seeds:
        return None
    return f"{name}-{min(seeds)}"


def hint(name: str) -> str:
    """A suggestion for an unknown name: the most similar model."""
    for similar in difflib.get_close_matches(name, models(), n=1):
        return f" (did you mean the trained model {similar!r}? polyhead list models)"
    return ""


def at_hand(name: str) -> pathlib.Path | None:
    """The folder of a model on this machine, or None."""
    parents = [REPOSITORY]
    if os.environ.get(OWN):
        parents.insert(0, pathlib.Path(os.environ[OWN]))
    with contextlib.suppress(RuntimeError):  # without a home folder there is no cache
        parents.append(cache("models", OWN))
    # A download that broke off leaves only some of the files, so such a folder does not count.
    for parent in parents:
        if all((parent / name / file).is_file() for file in FILES):
            return parent / name
    return None


def folder(name: str) -> pathlib.Path:
    """The run folder of a model of the index, downloaded if it is missing.

    Raises Damaged for files that are not those of the index, and ValueError if the model cannot be downloaded.
    """
    path = at_hand(name) or _download(name)
    checksum = hashlib.sha256()
    for file in FILES:
        checksum.update((path / file).read_bytes())
    if checksum.hexdigest() != models()[name]["sha256"]:
        raise Damaged(f"load: the files in {path} are not those that were published as {name}; delete that folder")
    return path


def _download(name: str) -> pathlib.Path:
    from torch.hub import download_url_to_file

    try:
        path = cache("models", OWN) / name
    except RuntimeError as error:
        raise ValueError(f"load: {name} is not here and there is no folder to download it to: {error}") from None
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            download_url_to_file(f"{SOURCE}/{name}/{file}", str(path / file), progress=sys.stderr.isatty())
    except (OSError, urllib.error.URLError, RuntimeError) as error:
        raise ValueError(
            f"load: {SOURCE}/{name} could not be downloaded ({one_line(error)}); "
            f"put the folder {name} into {path.parent}, or into the folder that {OWN} names"
        ) from None
    return path
