"""Redraw a figure from its results.json: nothing is trained, floors and verdicts are computed anew.

`redraw("docs/results/small/fig-2c")` is `polyhead reproduce fig-2c --from docs/results/small/fig-2c`.
"""

import datetime
import json
import pathlib
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version

from polyhead.config import digest
from polyhead.config.serial import numbers
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.recipes import FIGURES
from polyhead.papers.reproduce import RESULTS, About, check, on_published, runs_of, shown, written
from polyhead.papers.study import FinishedRun, Study
from polyhead.spec.shapes import one_of
from polyhead.train import Result
from polyhead.train.store.files import check_folder


def redraw(
    results: str | pathlib.Path, folder: str | pathlib.Path | None = None, *, figure: str | None = None
) -> tuple[pathlib.Path, FigureOutcome]:
    """Redraw the figure of `results` (results.json or its folder) in `folder` (default: the same folder).

    Returns the page and its contents.  `figure`: the required name of the figure.  The command, dates and scores of the
    runs are kept; "drawn" is the time of redrawing.

    Raises ValueError for results of another format, runs that differ from the recipe's, or a figure that needs more
    than final scores: models, or scores during training.
    """
    path = pathlib.Path(results)
    path = path / RESULTS if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"reproduce: {path} does not exist; give the folder of a figure, or its {RESULTS}")
    try:
        return _redrawn(path, pathlib.Path(folder or path.parent), figure)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"reproduce: {path} is damaged ({type(error).__name__}: {error})") from None


def _redrawn(path: pathlib.Path, place: pathlib.Path, figure: str | None) -> tuple[pathlib.Path, FigureOutcome]:
    check(path)
    about = json.loads(path.read_text(encoding="utf-8"))
    known = FIGURES[one_of("reproduce", "figure", about["figure"], FIGURES)]
    if figure not in (None, about["figure"]):
        raise ValueError(f"reproduce: {path} is of {about['figure']}, not of {figure}")
    if known.runs is None:
        raise ValueError(f"reproduce: {about['figure']} has no runs; polyhead reproduce {about['figure']} computes it")
    import_module("polyhead.papers.page")  # raises before the work if the extra is missing
    study = _study(about, path)
    check_folder("reproduce", place)
    try:
        outcome = known.draw(study, place)
    except ValueError as error:
        lacks = f"{about['figure']} is drawn from more than the final scores that {path} has ({error})"
        raise ValueError(f"reproduce: {lacks}; polyhead reproduce without --from trains its runs") from None
    when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about |= shown(outcome) | {"drawn": {"date": when, "polyhead": version("polyhead")}}
    return written(place, known.title, about, outcome), outcome


def _study(about: About, path: pathlib.Path) -> Study:
    """The study as after its sweep, without run folders."""
    known, rows = FIGURES[about["figure"]], {row["digest"]: row for row in about["runs"]}
    recipe = runs_of(known, about["scale"], about.get("seeds"))
    if "published" in about:  # the files are not needed: nothing is trained, and floors of published data are exact
        recipe = on_published(recipe, path.parent)
    runs = [replace(run, device="cpu") for run in recipe]
    found = [run for run in runs if digest(run) in rows]
    if len(found) != len(rows):
        lost = f"{len(rows) - len(found)} of its {len(rows)} runs are not of this version's recipe"
        raise ValueError(f"reproduce: {path}: {lost}; train them again")
    points = tuple(
        FinishedRun(run, _result(row, about, path), _courses(row), row.get("fingerprint"))
        for run in found
        for row in [rows[digest(run)]]
    )
    return Study(about["figure"], known.paper, about["scale"], path.parent, points)


def _courses(row: About) -> dict[str, dict[int, float]]:
    """The scores during training; older results have none."""
    return {
        split: {int(step): score for step, score in numbers(by).items()} for split, by in row.get("courses", {}).items()
    }


def _result(row: About, about: About, path: pathlib.Path) -> Result:
    return Result(
        name=row["name"],
        digest=row["digest"],
        steps=row["steps"],
        seconds=row["seconds"],
        parameters=row["parameters"],
        scores={split: numbers(found) for split, found in row["scores"].items()},
        command=about["command"],
        environment={"device": row["device"], "date": row["date"]},
        folder=path.parent / "runs" / row["name"],
    )
