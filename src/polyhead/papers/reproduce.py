"""Every figure and table of the papers with one command: train or resume its runs, draw it, compare it with the paper
and judge its claims.

`reproduce("table-a1", "small")` is `polyhead reproduce table-a1 --scale small`.
"""

import datetime
import json
import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from polyhead.config import Run, digest, to_dict
from polyhead.papers.claims import Verdict
from polyhead.papers.dual.maths import on_files
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.recipes import FIGURES, default_scale, for_seeds
from polyhead.papers.sizes import SCALES
from polyhead.papers.study import FinishedRun, Paper, Study
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines.here import Here
from polyhead.scale.sweep.jobs import sweep
from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of
from polyhead.tasks import Maths, RelationalGames
from polyhead.train import Result
from polyhead.train.device import environment
from polyhead.train.store.files import check_folder

# The content of results.json.
About = dict[str, Any]
# The version of the layout of results.json.
FORMAT = 1
RESULTS = "results.json"


def reproduce(
    figure: str,
    scale: str | None = None,
    *,
    folder: str | pathlib.Path | None = None,
    workers: int | None = None,
    device: str = "auto",
    seeds: int | None = None,
    published: str | pathlib.Path | None = None,
    progress: bool = True,
) -> tuple[pathlib.Path, FigureOutcome, tuple[Failure, ...]]:
    """Train the unfinished runs of `figure`, draw it, and write results.json, README.md, pictures and index.html.

    `folder` (default runs/reproduce/SCALE) has the runs, which figures share, and a folder for each figure.
    `scale`: by default `short` for figures about fuzzy logic, `small` for the others.  `seeds`: their number (default:
    that of the scale); a verdict takes five.  `published`: see `on_published`.  Returns the page, its contents, and the
    failed runs, which the figure omits.
    """
    known = FIGURES[one_of("polyhead reproduce", "figure", figure, FIGURES)]
    scale = one_of("polyhead reproduce", "scale", scale or default_scale(figure), SCALES)
    runs = tuple(replace(run, device=device) for run in runs_of(known, scale, seeds))
    if published is not None:
        runs = on_published(runs, published)
    base = pathlib.Path(folder or f"runs/reproduce/{scale}")
    target = base / figure

    # Ahead of any training: what would lose its results.
    check_extra()
    check(target / RESULTS)
    check_folder("reproduce", target)
    from polyhead.papers.page import write_all  # needs the extra

    outcomes: Sequence[Result | Failure] = ()
    if runs:
        engine = Here() if scale == "smoke" and workers is None else None
        outcomes = sweep(runs, base, workers=workers, progress=progress, engine=engine)
    study = Study.of(figure, known.paper, scale, base, runs, outcomes)
    if known.runs is None:
        outcome = known.draw(scale)
    elif study.points:
        outcome = known.draw(study)
    else:
        raise ValueError(f"reproduce: none of the {len(runs)} runs of {figure} finished; {study.failures[0].error}")
    about = described(figure, known, scale, study, outcome, seeds, published=published)
    return write_all(target, known.title, about, outcome), outcome, study.failures


def check_extra() -> None:
    """Raise ValueError if a package of the extra `report` is missing."""
    with optional("reproduce", "polyhead[report]"):
        import jinja2
        import matplotlib
        import pandas
        import scipy.stats
    del jinja2, matplotlib, pandas, scipy


def check(path: pathlib.Path) -> None:
    """Raise a ValueError if `path` exists in another format: results of another version are not overwritten."""
    if not path.exists():
        return
    try:
        version = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (ValueError, RecursionError, TypeError, KeyError, OSError):
        version = "none that can be read"
    if version != FORMAT:
        raise ValueError(f"reproduce: {path} has format {version}, not {FORMAT}; choose another --folder or delete it")


# ---------------------------------------------------------------------------------------------------------------- runs
def runs_of(known: Figure, scale: str, seeds: int | None) -> tuple[Run, ...]:
    """Return the runs of a figure with its own number of seeds (None) or another one."""
    if known.runs is None:
        if seeds is not None:
            raise ValueError(f"reproduce: {known.title} has no runs, so --seeds has no effect")
        return ()
    if seeds is None:
        return known.runs(scale)
    return for_seeds(known.runs(scale), seeds)


def on_published(runs: Sequence[Run], folder: str | pathlib.Path) -> tuple[Run, ...]:
    """Return the same runs on the published files of relational games or mathematics in `folder`.

    Splits without published files are not scored: mathematics has none of longer questions or larger numbers for its
    five modules, but longer questions in those it has, so its models read more characters.  Raises ValueError for runs
    of other tasks, and if `folder` does not exist.
    """
    target = pathlib.Path(folder).expanduser().absolute()
    if not target.is_dir():
        raise ValueError(f"reproduce: --published {folder} is no folder")
    published_runs = []
    for run in runs:
        if not isinstance(run.task, RelationalGames | Maths):
            raise ValueError(
                f"reproduce: --published is for figures of relational games and maths, not of {run.task.name}"
            )
        task = replace(run.task, data="original", folder=str(target))
        splits = tuple(split for split in run.train.evaluate if split in task.splits)
        moved = on_files(run, task) if isinstance(task, Maths) else replace(run, task=task)
        published_runs.append(replace(moved, train=replace(run.train, evaluate=splits)))
    return tuple(published_runs)


# ------------------------------------------------------------------------------------------------------------- results
def described(
    figure: str,
    known: Figure,
    scale: str,
    study: Study,
    outcome: FigureOutcome,
    seeds: int | None = None,
    *,
    published: str | pathlib.Path | None = None,
) -> About:
    """Return the content of results.json: how it was made, every run, and the outcome."""
    options: dict[str, int | str] = {}
    if seeds is not None:
        options["seeds"] = seeds
    if published is not None:
        options["published"] = str(published)
    command = f"polyhead reproduce {figure} --scale {scale}"
    for name, value in options.items():
        command += f" --{name} {shlex.quote(str(value))}"
    return {
        "format": FORMAT,
        "figure": figure,
        "title": known.title,
        "scale": scale,
        **options,
        "command": command,
        "date": now(),
        "environment": environment(torch.device("cpu")),
        "training_seconds": round(sum(point.result.seconds for point in study.points), 1),
        **outcome_as_json(outcome),
        "failures": [{"name": failure.name, "error": failure.error} for failure in study.failures],
        "runs": [run_as_json(study.paper, point) for point in study.points],
    }


def now() -> str:
    """Return the local time."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def outcome_as_json(outcome: FigureOutcome) -> About:
    """Return the outcome in the layout of results.json."""
    return {
        "verdicts": list(map(Verdict.to_dict, outcome.verdicts)),
        "notes": list(outcome.notes),
        "head": list(outcome.head),
        "rows": list(map(list, outcome.rows)),
        "numbers": outcome.numbers,
        "pictures": [picture.stem for picture in outcome.pictures],
    }


def run_as_json(paper: Paper, point: FinishedRun) -> About:
    """Return a run in the layout of results.json."""
    run, result = point.run, point.result
    row: About = {"name": run.name, "digest": digest(run)}
    for axis, value in paper.coordinates(run).items():
        if axis not in ("length", "held out"):
            row[axis] = value
    row |= {
        "task": to_dict(run.task),
        "seed": run.seed,
        "lr": run.train.lr,
        "weight_decay": run.train.weight_decay,
        "warmup": run.train.warmup,
        "steps": run.train.steps,
        "seconds": round(result.seconds, 1),
        "parameters": result.parameters,
        "device": result.environment.get("device", ""),
        "date": result.environment.get("date", ""),
        "scores": result.scores,
        "courses": point.read_courses(),
    }
    fingerprint = point.fingerprint()
    if fingerprint is not None:
        row["fingerprint"] = fingerprint
    return row
