"""The command list: shows recipes, mechanisms, models, runs and their scores."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from polyhead.cli.output import Row, emit, write_table
from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.scale.records import Records
    from polyhead.tasks.base import Task

UNSEEN_SPLITS = ("compositional", "novel")
"""The first of a model's splits that begins with one of these has its score on unseen data."""

RECIPES_LEGEND = "polyhead train NAME trains a recipe; polyhead train NAME --help says more and lists its fields."
FIGURES_LEGEND = """\
polyhead reproduce NAME trains and draws a figure. Core minutes: all runs at --scale small with its own number of seeds,
mostly three. GPU minutes: one run at --scale paper, as the paper states. Figures of fuzzy logic also have
--scale short."""
MODELS_LEGEND = """\
ph.load("NAME") gives the run and the model, polyhead eval NAME scores it again. A name without its seed is that of the
first seed. known: fresh data of the kinds in training; unseen: combinations that training did not show. What is not
here is downloaded at its first use."""

What = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")]


# --------------------------------------------------------------------------------- the command list
def list_all(what: What, folders: Folders = ()) -> int:
    """List recipes, figures, tasks, mechanisms, implementations, trained models, or the runs in a folder.

    examples:
      polyhead list recipes
      polyhead list runs
      polyhead list mechanisms

    Args:
        what: recipes, figures, tasks, mechanisms, implementations, models or runs.
        folders: For runs: folders to search, at any depth; without any, the folder runs.
    """
    from polyhead.scale.records import records

    what = one_of("polyhead list", "kind", what, [*LISTS, "runs"])
    if folders and what != "runs":
        raise ValueError(f"polyhead list: a folder is for runs, not for {what}")
    if what == "runs":
        run_records = records(*folders, caller="list runs")
        emit(run_records.rows(), write_records, run_records, "Runs", folders=True)
        return 0
    make_rows, legend = LISTS[what]
    rows = make_rows()
    emit(rows, write_table, what.capitalize(), rows, legend)
    return 0


# ------------------------------------------------------------------------------------------------------- tables of runs
def write_records(records: "Records", title: str, *, folders: bool = False) -> None:
    """Print a row for each run: its distinguishing settings, state, scores, folder, and error if it failed."""
    has_failures = any(record.detail for record in records)
    rows = []
    for record, cells in zip(records, records.cells(states=True), strict=True):
        row = {**cells, "folder": record.folder.name}
        if folders:
            row["folder"] = str(record.folder)
        if has_failures:
            row[""] = record.detail
        rows.append(row)
    if records.best():
        title += " (* best, mean ± standard error)"
    write_table(title, rows)


# ------------------------------------------------------------------------------------------------------------ the lists
def recipes() -> list[Row]:
    """The recipes of single runs, those of users first."""
    from polyhead.extensions import with_added
    from polyhead.papers.recipes import MINUTES, RECIPES, STUDIES

    rows: list[Row] = []
    for name, recipe in with_added("recipes", RECIPES, "recipes").items():
        if name not in STUDIES:
            rows.append({"recipe": name, "core minutes": _minutes(MINUTES.get(name)), "summary": _summary(recipe)})
    return rows


def figures() -> list[Row]:
    """The figures of the papers, with their costs."""
    from polyhead.papers.recipes import FIGURES

    rows: list[Row] = []
    for name, figure in FIGURES.items():
        scales = "small, paper"
        if figure.short:
            scales = "small, short, paper"
        if not figure.runs:
            scales = ""
        row = {"figure": name, "title": figure.title, "scales": scales}
        rows.append({**row, "core minutes": _minutes(figure.minutes), "GPU minutes": figure.gpu})
    return rows


def _minutes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}"


def _summary(definition: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(definition) or "").partition("\n")[0]


def tasks() -> list[Row]:
    """The tasks and their main metrics."""
    from polyhead.extensions import added
    from polyhead.tasks import KINDS

    registered = cast("dict[str, type[Task]]", added("tasks"))
    rows: list[Row] = []
    for kind in (*KINDS, *registered.values()):
        fields = ", ".join(field.name for field in dataclasses.fields(kind))
        rows.append({"task": kind.__name__, "summary": _summary(kind), "metric": kind.metric, "fields": fields})
    return rows


def mechanisms() -> list[Row]:
    """The mechanisms with their equations."""
    from polyhead.extensions import added
    from polyhead.spec import MECHANISMS

    rows: list[Row] = []
    for row in MECHANISMS:
        summary = f"{row.summary} ({row.source})"
        rows.append({"mechanism": row.config, "equation": f"{row.equation}\n{summary}"})
    for name, kind in added("mechanisms").items():
        rows.append({"mechanism": name, "equation": _summary(kind)})
    return rows


def implementations() -> list[Row]:
    """The implementations of each op, in the order in which "auto" asks them."""
    from polyhead.ops.native import library
    from polyhead.ops.registry import IMPLS

    rows: list[Row] = []
    for op, names in IMPLS.items():
        native = ""
        if "native" in names:
            native = library.status(op)
        rows.append({"op": op, "implementations": ", ".join(names), "native": native})
    return rows


def models() -> list[Row]:
    """The trained models, with the scores of those whose files are on this machine: a list downloads nothing."""
    from polyhead.train import read_config, read_result, shipped

    rows: list[Row] = []
    for name in shipped.MODELS:
        row = {"model": name, **dict.fromkeys(("task", "known", "unseen", "steps", "parameters"), "–"), "here": "no"}
        rows.append(row)
        folder = shipped.at_hand(name)
        if folder is None:
            continue
        row["here"] = "yes"
        result = read_result(folder)
        if result is None:
            continue
        task = read_config(folder).task
        row |= {"task": task.name, "steps": f"{result.steps:,}", "parameters": f"{result.parameters:,}"}
        for split in result.scores:
            numbers = result.scores[split]
            text = f"{task.metric} {numbers[task.metric]:.3f} ± {numbers[f'{task.metric}_se']:.3f}"
            if split == "iid":
                row["known"] = text
            elif split.startswith(UNSEEN_SPLITS) and row["unseen"] == "–":
                row["unseen"] = text
    return rows


LISTS: dict[str, tuple[Callable[[], list[Row]], str]] = {
    "recipes": (recipes, RECIPES_LEGEND),
    "figures": (figures, FIGURES_LEGEND),
    "tasks": (tasks, ""),
    "mechanisms": (mechanisms, "parameters and multiply-adds of each: docs/mechanisms"),
    "implementations": (implementations, ""),
    "models": (models, MODELS_LEGEND),
}
"""A word on the command line -> its rows and a note below them."""
