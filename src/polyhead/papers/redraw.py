"""Redraw a figure from its results.json: nothing is trained, baselines and verdicts are computed anew.

`redraw("docs/results/small/fig-2c")` is `polyhead reproduce fig-2c --from docs/results/small/fig-2c`.
"""

import json
import pathlib
from dataclasses import replace
from importlib.metadata import version

from polyhead.config import Run, digest
from polyhead.config.serial import numbers
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.recipes import FIGURES
from polyhead.papers.reproduce import (
    RESULTS,
    About,
    check,
    check_extra,
    now,
    on_published,
    outcome_as_json,
    runs_of,
)
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
    if path.is_dir():
        path = path / RESULTS
    if not path.is_file():
        raise ValueError(f"reproduce: {path} does not exist; give the folder of a figure, or its {RESULTS}")
    target = pathlib.Path(folder or path.parent)
    check(path)
    check_extra()
    from polyhead.papers.page import write_all  # needs the extra

    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        name = one_of("reproduce", "figure", about["figure"], FIGURES)
        known = FIGURES[name]
        if figure not in (None, name):
            raise ValueError(f"reproduce: {path} is of {name}, not of {figure}")
        if known.runs is None:
            raise ValueError(f"reproduce: {name} has no runs; polyhead reproduce {name} computes it")
        study = study_from(about, path)
        check_folder("reproduce", target)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"reproduce: {path} is damaged ({type(error).__name__}: {error})") from None
    try:
        outcome = known.draw(study)
    except ValueError as error:
        needs = f"{name} is drawn from more than the final scores that {path} has ({error})"
        raise ValueError(f"reproduce: {needs}; polyhead reproduce without --from trains its runs") from None
    about |= outcome_as_json(outcome) | {"drawn": {"date": now(), "polyhead": version("polyhead")}}
    return write_all(target, known.title, about, outcome), outcome


def study_from(about: About, path: pathlib.Path) -> Study:
    """Return the study as after its sweep, without run folders."""
    known = FIGURES[about["figure"]]
    row_by_digest = {row["digest"]: row for row in about["runs"]}
    recipe = runs_of(known, about["scale"], about.get("seeds"))
    if "published" in about:  # the files are not needed: nothing is trained, and baselines of published data are exact
        recipe = on_published(recipe, path.parent)
    points = []
    for run in recipe:
        run = replace(run, device="cpu")
        row = row_by_digest.get(digest(run))
        if row is not None:
            points.append(finished_run(run, row, about, path))
    # A run of another recipe cannot be drawn, and without it the figure would be of fewer runs.
    if len(points) != len(row_by_digest):
        count = len(row_by_digest)
        others = f"{count - len(points)} of its {count} runs are not of this version's recipe"
        raise ValueError(f"reproduce: {path}: {others}; train them again")
    return Study(about["figure"], known.paper, about["scale"], path.parent, tuple(points))


def finished_run(run: Run, row: About, about: About, path: pathlib.Path) -> FinishedRun:
    """Return a run from its row of results.json; older results have no scores during training."""
    courses = {}
    for split, score_by_step in row.get("courses", {}).items():
        courses[split] = {int(step): score for step, score in numbers(score_by_step).items()}
    result = Result(
        name=row["name"],
        digest=row["digest"],
        steps=row["steps"],
        seconds=row["seconds"],
        parameters=row["parameters"],
        scores={split: numbers(scores) for split, scores in row["scores"].items()},
        command=about["command"],
        environment={"device": row["device"], "date": row["date"]},
        folder=path.parent / "runs" / row["name"],
    )
    return FinishedRun(run, result, courses, row.get("fingerprint"))
