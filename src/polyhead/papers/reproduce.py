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
from importlib import import_module
from typing import Any

import torch

from polyhead.config import Run, digest, to_dict
from polyhead.config.serial import legal
from polyhead.papers.dual.maths import on_files
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.recipes import FIGURES, default_scale, for_seeds
from polyhead.papers.sizes import SCALES
from polyhead.papers.study import FinishedRun, Paper, Study
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import Engine
from polyhead.scale.sweep.engines.here import Here
from polyhead.scale.sweep.jobs import sweep
from polyhead.spec.shapes import one_of
from polyhead.tasks import Maths, RelationalGames
from polyhead.train import Result
from polyhead.train.store.files import check_folder
from polyhead.train.store.folder import environment, write

__all__ = ["check", "reproduce"]

About = dict[str, Any]
"""The content of results.json."""
FORMAT = 1
"""The version of the layout of results.json."""
RESULTS, PAGE = "results.json", "index.html"


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
    """Train the unfinished runs of `figure`, draw it, and write results.json and index.html.

    `folder` (default runs/reproduce/SCALE) has the runs, which figures share, and a folder for each figure.
    `scale`: by default `short` for figures about fuzzy logic, `small` for the others.
    `seeds`: their number (default: that of the scale); a verdict takes five.
    `published`: see `on_published`.  Returns the page, its contents, and the failed runs, which the figure omits.
    """
    known = FIGURES[one_of("polyhead reproduce", "figure", figure, FIGURES)]
    import_module("polyhead.papers.page")  # raises before training if the extra is missing

    scale = one_of("polyhead reproduce", "scale", scale or default_scale(figure), SCALES)
    runs = tuple(replace(run, device=device) for run in runs_of(known, scale, seeds))
    runs = runs if published is None else on_published(runs, published)
    base = pathlib.Path(folder or f"runs/reproduce/{scale}")
    place = base / figure
    check(place / RESULTS)
    check_folder("reproduce", place)
    outcomes: Sequence[Result | Failure] = ()
    if known.runs is not None:
        engine = Here() if scale == "smoke" and workers is None else None
        outcomes = train(runs, base, workers=workers, progress=progress, engine=engine)
    study = Study.of(figure, known.paper, scale, base, runs, outcomes)
    if known.runs is None:
        outcome = known.draw(scale, place)
    elif study.points:
        outcome = known.draw(study, place)
    else:
        raise ValueError(f"reproduce: none of the {len(runs)} runs of {figure} finished; {study.failures[0].error}")
    about = described(figure, known, scale, study, outcome, seeds, published=published)
    return written(place, known.title, about, outcome), outcome, study.failures


def written(place: pathlib.Path, title: str, about: About, outcome: FigureOutcome) -> pathlib.Path:
    """Write `results.json` and the page into the folder `place`; the path of the page."""
    from polyhead.papers.page import write_page

    write(place / RESULTS, as_json(about))
    return write_page(place / PAGE, title, about, outcome)


def as_json(about: About) -> bytes:
    """JSON with a line for each run, row or verdict: short, and changes show in a diff."""
    said = []
    for name, value in about.items():
        rows = isinstance(value, (list, tuple)) and any(isinstance(row, (dict, list, tuple)) for row in value)
        parts = [json.dumps(legal(row), ensure_ascii=False) for row in (value if rows else [value])]
        text = "[\n  " + ",\n  ".join(parts) + "\n ]" if rows else parts[0]
        said.append(f"{json.dumps(name)}: {text}")
    return ("{\n " + ",\n ".join(said) + "\n}\n").encode()


def runs_of(known: Figure, scale: str, seeds: int | None) -> tuple[Run, ...]:
    """The runs of a figure with its own number of seeds (None) or another one."""
    if known.runs is None:
        if seeds is not None:
            raise ValueError(f"reproduce: {known.title} has no runs, so --seeds has no effect")
        return ()
    return known.runs(scale) if seeds is None else for_seeds(known.runs(scale), seeds)


def on_published(runs: Sequence[Run], folder: str | pathlib.Path) -> tuple[Run, ...]:
    """The same runs on the published files of relational games or mathematics in `folder`, in place of generated data.

    Splits without published files are not scored: mathematics has none of longer questions or larger numbers for its
    five modules, but longer questions in those it has, so its models read more characters.  Raises ValueError for runs
    of other tasks, and if `folder` does not exist.
    """
    place = pathlib.Path(folder).expanduser().absolute()
    if not place.is_dir():
        raise ValueError(f"reproduce: --published {folder} is no folder")
    found = []
    for run in runs:
        task = run.task
        if not isinstance(task, (RelationalGames, Maths)):
            raise ValueError(f"reproduce: --published is for figures of relational games and maths, not of {task.name}")
        task = replace(task, data="original", folder=str(place))
        evaluated = tuple(split for split in run.train.evaluate if split in task.splits)
        run = on_files(run, task) if isinstance(task, Maths) else replace(run, task=task)
        found.append(replace(run, train=replace(run.train, evaluate=evaluated)))
    return tuple(found)


def train(
    runs: Sequence[Run],
    folder: pathlib.Path,
    *,
    workers: int | None = None,
    progress: bool = True,
    engine: Engine | None = None,
) -> Sequence[Result | Failure]:
    """Train in parallel workers."""
    return sweep(runs, folder, workers=workers, progress=progress, engine=engine)


def check(path: pathlib.Path) -> None:
    """Raise a ValueError if `path` exists in another format: another version's results are not overwritten."""
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (ValueError, RecursionError, TypeError, KeyError, OSError):
        found = "none that can be read"
    if found != FORMAT:
        raise ValueError(f"reproduce: {path} has format {found}, not {FORMAT}; choose another --folder or delete it")


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
    """The content of results.json: how it was made, every run, and the outcome."""
    asked: dict[str, int | str] = {} if seeds is None else {"seeds": seeds}
    asked |= {} if published is None else {"published": str(published)}
    return {
        "format": FORMAT,
        "figure": figure,
        "title": known.title,
        "scale": scale,
        **asked,
        "command": f"polyhead reproduce {figure} --scale {scale}"
        + "".join(f" --{k} {shlex.quote(str(n))}" for k, n in asked.items()),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(torch.device("cpu")),
        "training_seconds": round(sum(point.result.seconds for point in study.points), 1),
        **shown(outcome),
        "failures": [{"name": failure.name, "error": failure.error} for failure in study.failures],
        "runs": [_row(study.paper, point) for point in study.points],
    }


def shown(outcome: FigureOutcome) -> About:
    """The outcome in the layout of results.json."""
    return {
        "verdicts": [verdict.to_dict() for verdict in outcome.verdicts],
        "notes": list(outcome.notes),
        "head": list(outcome.head),
        "rows": [list(row) for row in outcome.rows],
        "numbers": outcome.numbers,
        "pictures": [stem for stem, _ in outcome.pictures],
    }


def _row(paper: Paper, point: FinishedRun) -> dict[str, Any]:
    run, result = point.run, point.result
    where = {axis: place for axis, place in paper.places(run).items() if axis not in ("length", "held out")}
    train = run.train
    return {
        "name": run.name,
        "digest": digest(run),
        **where,
        "task": to_dict(run.task),
        "seed": run.seed,
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "warmup": train.warmup,
        "steps": train.steps,
        "seconds": round(result.seconds, 1),
        "parameters": result.parameters,
        "device": result.environment.get("device", ""),
        "date": result.environment.get("date", ""),
        "scores": result.scores,
        "courses": point.read_courses(),
        **({} if (text := point.fingerprint()) is None else {"fingerprint": text}),
    }
