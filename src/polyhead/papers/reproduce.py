"""Every figure and table of the papers with one command: train or resume its runs, draw it, compare it with the paper
and judge its claims.

`reproduce("table-a1", "small")` is `polyhead reproduce table-a1 --scale small`.
`redraw("docs/results/small/fig-2c")` is `polyhead reproduce fig-2c --from docs/results/small/fig-2c`.
"""

import datetime
import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from polyhead.analysis.claims import Verdict
from polyhead.config import Run, digest, to_dict
from polyhead.papers.outcome import Figure, FigureOutcome
from polyhead.papers.recipes import FIGURES, default_scale, for_seeds
from polyhead.papers.sizes import SCALES
from polyhead.papers.study import TRAINING_LOSS, FinishedRun, Study
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines.here import Here
from polyhead.scale.sweep.jobs import sweep
from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of
from polyhead.spec.values import numbers
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
    progress: bool = True,
) -> tuple[pathlib.Path, FigureOutcome, tuple[Failure, ...]]:
    """Train the unfinished runs of `figure`, draw it, and write results.json, README.md, pictures and index.html.

    Args:
        scale: By default `short` for figures about fuzzy logic, `small` for the others.
        folder: Has the runs, which figures share, and a folder for each figure; by default runs/reproduce/SCALE.
        seeds: The number of seeds, by default that of the scale; a verdict takes five.

    Returns:
        The page, its contents, and the failed runs, which the figure omits.
    """
    definition = FIGURES[one_of("polyhead reproduce", "figure", figure, FIGURES)]
    scale = one_of("polyhead reproduce", "scale", scale or default_scale(figure), SCALES)
    runs = tuple(replace(run, device=device) for run in runs_of(definition, scale, seeds))
    base = pathlib.Path(folder or f"runs/reproduce/{scale}")
    target = base / figure

    # Ahead of any training: what would lose its results.
    check_extra()
    check_format(target / RESULTS)
    check_folder("reproduce", target)
    from polyhead.papers.page import write_all  # needs the extra

    outcomes: Sequence[Result | Failure] = ()
    if runs:
        engine = Here() if scale == "smoke" and workers is None else None  # workers would take longer to start
        outcomes = sweep(runs, base, workers=workers, progress=progress, engine=engine)
    study = Study.of(figure, definition.paper, scale, base, runs, outcomes)
    if definition.runs is None:
        outcome = definition.draw(scale)
    elif study.points:
        outcome = definition.draw(study)
    else:
        raise ValueError(f"reproduce: none of the {len(runs)} runs of {figure} finished; {study.failures[0].error}")
    about = described(definition.title, study, outcome, seeds)
    return write_all(target, about, outcome), outcome, study.failures


def check_extra() -> None:
    """Raise ValueError if a package of the extra `report` is missing."""
    with optional("reproduce", "polyhead[report]"):
        import jinja2
        import matplotlib
        import pandas
        import scipy.stats
    del jinja2, matplotlib, pandas, scipy


def check_format(path: pathlib.Path) -> None:
    """Raise a ValueError if `path` exists in another format: results of another version are not overwritten."""
    if not path.exists():
        return
    try:
        kept_format = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (ValueError, RecursionError, TypeError, KeyError, OSError):
        kept_format = "none that can be read"
    if kept_format != FORMAT:
        raise ValueError(
            f"reproduce: {path} has format {kept_format}, not {FORMAT}; choose another --folder or delete it"
        )


def runs_of(definition: Figure, scale: str, seeds: int | None) -> tuple[Run, ...]:
    """Return the runs of a figure with its own number of seeds (None) or another one."""
    if definition.runs is None:
        if seeds is not None:
            raise ValueError(f"reproduce: {definition.title} has no runs, so --seeds has no effect")
        return ()
    if seeds is None:
        return definition.runs(scale)
    return for_seeds(definition.runs(scale), seeds)


# ------------------------------------------------------------------------------------------------------------- results
def described(title: str, study: Study, outcome: FigureOutcome, seeds: int | None = None) -> About:
    """Return the content of results.json: how it was made, every run, and the outcome."""
    about: About = {"format": FORMAT, "figure": study.figure, "title": title, "scale": study.scale}
    command = f"polyhead reproduce {study.figure} --scale {study.scale}"
    if seeds is not None:
        about["seeds"] = seeds
        command += f" --seeds {seeds}"
    return {
        **about,
        "command": command,
        "date": now(),
        "environment": environment(torch.device("cpu")),
        "training_seconds": round(sum(point.result.seconds for point in study.points), 1),
        **outcome_as_json(outcome),
        "failures": [{"name": failure.name, "error": failure.error} for failure in study.failures],
        "diverged": [digest(run) for run in study.diverged],
        "runs": [run_as_json(study, point) for point in study.points],
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


def run_as_json(study: Study, point: FinishedRun) -> About:
    """Return a run in the layout of results.json."""
    run, result = point.run, point.result
    courses: dict[str, dict[str, float]] = {}
    for split, score_by_step in point.read_courses(run.task.metric).items():
        courses[split] = {}
        for step, score in score_by_step.items():
            if split != TRAINING_LOSS:
                score = round(score, 6)
            courses[split][str(step)] = score
    row: About = {"name": run.name, "digest": digest(run)}
    for axis, value in study.paper.coordinates(run).items():
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
        "courses": courses,
    }
    fingerprint = point.fingerprint()
    if fingerprint is not None:
        row["fingerprint"] = fingerprint
    return row


# ------------------------------------------------------------------------------------------------------- drawing again
def redraw(
    results: str | pathlib.Path, folder: str | pathlib.Path | None = None, *, figure: str | None = None
) -> tuple[pathlib.Path, FigureOutcome]:
    """Redraw the figure of `results` (results.json or its folder) and return the page and its contents.

    Nothing is trained; baselines and verdicts are computed anew.  The command, dates and scores of the runs are kept;
    "drawn" is the time of redrawing.

    Args:
        folder: By default that of `results`.
        figure: The required name of the figure; by default any.

    Raises:
        ValueError: For another format, runs unlike the recipe's, and a figure of models or of scores during training.
    """
    path = pathlib.Path(results)
    if path.is_dir():
        path = path / RESULTS
    if not path.is_file():
        raise ValueError(f"reproduce: {path} does not exist; give the folder of a figure, or its {RESULTS}")
    target = pathlib.Path(folder or path.parent)
    check_format(path)
    check_extra()
    from polyhead.papers.page import write_all  # needs the extra

    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        name = one_of("reproduce", "figure", about["figure"], FIGURES)
        definition = FIGURES[name]
        if figure not in (None, name):
            raise ValueError(f"reproduce: {path} is of {name}, not of {figure}")
        if definition.runs is None:
            raise ValueError(f"reproduce: {name} has no runs; polyhead reproduce {name} computes it")
        study = study_from(about, path)
        check_folder("reproduce", target)
        try:
            outcome = definition.draw(study)
        except ValueError as error:
            needs = f"{name} is drawn from more than the final scores that {path} has ({error})"
            raise ValueError(f"reproduce: {needs}; polyhead reproduce without --from trains its runs") from None
        about |= outcome_as_json(outcome) | {"drawn": {"date": now(), "polyhead": version("polyhead")}}
        return write_all(target, about, outcome), outcome
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"reproduce: {path} is damaged ({type(error).__name__}: {error})") from error


def study_from(about: About, path: pathlib.Path) -> Study:
    """Return the study as after its sweep, without run folders."""
    definition = FIGURES[about["figure"]]
    row_by_digest = {row["digest"]: row for row in about["runs"]}
    points = []
    diverged = []
    for run in runs_of(definition, about["scale"], about.get("seeds")):
        run = replace(run, device="cpu")
        if digest(run) in about.get("diverged", ()):
            diverged.append(run)
        row = row_by_digest.get(digest(run))
        if row is not None:
            points.append(finished_run(run, row, about, path))
    # A run of another recipe cannot be drawn, and without it the figure would be of fewer runs.
    if len(points) != len(row_by_digest):
        count = len(row_by_digest)
        others = f"{count - len(points)} of its {count} runs are not of this version's recipe"
        raise ValueError(f"reproduce: {path}: {others}; train them again")
    return Study(
        about["figure"], definition.paper, about["scale"], path.parent, tuple(points), diverged=tuple(diverged)
    )


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
