"""Trained models that come with polyhead.  The package has their index; the files are in `models/` of the repository.

Each is a run folder, so every command that takes a folder also takes a name, as in `polyhead eval fuzzy-hyla`: the
lowest seed of that name.  Missing files are downloaded once.
"""

import contextlib
import json
import pathlib
import re
import sys

from polyhead.spec.home import cache
from polyhead.spec.values import one_line

INDEX = pathlib.Path(__file__).with_name("models.json")
MODELS: list[str] = json.loads(INDEX.read_text(encoding="utf-8"))
"""The names of the models."""
FILES = ("checkpoint.safetensors", "config.json", "metrics.jsonl", "result.json")
REPOSITORY = pathlib.Path(__file__).parents[3] / "models"
SOURCE = "https://github.com/polyhead/polyhead/raw/main/models"


def model_named(name: str) -> str | None:
    """The model of that name in the index, or None; a name without a seed means the lowest seed."""
    matching = [model for model in MODELS if re.fullmatch(rf"{re.escape(name)}(-\d+)?", model)]
    return min(matching, key=lambda model: (len(model), model), default=None)


def at_hand(name: str) -> pathlib.Path | None:
    """The folder of a model on this machine, or None."""
    folders = [REPOSITORY / name]
    with contextlib.suppress(RuntimeError):  # without a home folder there is no cache
        folders.append(cache("models", "XDG_CACHE_HOME") / name)
    # A download that broke off leaves only some of the files, so such a folder does not count.
    for folder in folders:
        if all((folder / file).is_file() for file in FILES):
            return folder
    return None


def folder(name: str) -> pathlib.Path:
    """The run folder of a model of the index, downloaded if it is missing.  Raises ValueError if that fails."""
    path = at_hand(name)
    if path is not None:
        return path
    from torch.hub import download_url_to_file

    try:
        path = cache("models", "XDG_CACHE_HOME") / name
        path.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            download_url_to_file(f"{SOURCE}/{name}/{file}", str(path / file), progress=sys.stderr.isatty())
    except (OSError, RuntimeError) as error:
        text = f"{SOURCE}/{name} could not be downloaded ({one_line(error)})"
        raise ValueError(f"load: {text}; put that folder into ~/.cache/polyhead/models") from None
    return path
