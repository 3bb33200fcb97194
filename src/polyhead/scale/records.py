"""Runs on the disk as a table of names, settings, states and scores; as Markdown, CSV, LaTeX or JSON."""

import html
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyhead.config import Run, digest, to_dict
from polyhead.scale.sweep.job import State
from polyhead.scale.sweep.naming import differing, labels
from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of
from polyhead.spec.values import legal
from polyhead.train.messages import print_notice
from polyhead.train.store import folder as run_folder
from polyhead.train.store.folder import (
    CONFIG,
    FAILURE,
    Result,
    finished,
    folder_in_sweep,
    is_claimed,
    read_config,
    read_metrics,
)

if TYPE_CHECKING:
    import pandas

FORMATS = ("md", "csv", "latex", "json")


# -------------------------------------------------------------------------------------------------------------- one run
@dataclass(frozen=True)
class Record:
    """A run on the disk.

    Attributes:
        settings: The fields in which the runs of the table differ.
        scores: Split -> loss, and the mean and standard error `<metric>_se` of each metric, of a finished run.
    """

    label: str
    run: Run
    folder: pathlib.Path
    state: State
    step: int
    detail: str
    settings: Mapping[str, object]
    scores: Mapping[str, Mapping[str, float]]
    parameters: int | None = None
    seconds: float | None = None

    def row(self) -> dict[str, object]:
        """Return the run as a row: settings, state, step, `SPLIT METRIC` and `SPLIT METRIC_se` of each score, size."""
        row: dict[str, object] = {"run": self.label, **self.settings}
        row |= {"state": str(self.state), "step": self.step, "steps": self.run.train.steps}
        for split, scores in self.scores.items():
            for name, score in scores.items():
                row[f"{split} {name}"] = score
        return row | {"parameters": self.parameters, "seconds": self.seconds, "folder": str(self.folder)}

    def score(self, split: str) -> float | None:
        """Return the main metric of its task on `split`; None if there is none."""
        return self.scores.get(split, {}).get(self.run.task.metric)

    def score_text(self, split: str) -> str:
        """Return the main metric with its standard error; empty if there is none."""
        score = self.score(split)
        if score is None:
            return ""
        error = self.scores[split].get(f"{self.run.task.metric}_se")
        if error is None:
            return f"{score:.3f}"
        return f"{score:.3f} ± {error:.3f}"


def state_of(run: Run, folder: pathlib.Path, result: Result | None) -> tuple[State, int, str]:
    """Return the state of a run, its number of steps, and the error of a failed run; a finished one has a `result`.

    A "running" run has a process that trains it, here or elsewhere.  A "stopped" one has neither process nor error; the
    same command resumes it.
    """
    if not folder.is_dir():
        return State.WAITING, 0, ""
    if result is not None:
        return State.DONE, result.steps, ""
    rows = read_metrics(folder)
    step = max((row["step"] for row in rows), default=0)
    if is_claimed(folder):
        return State.RUNNING, step, ""
    failure = folder / FAILURE
    if failure.is_file():
        return State.FAILED, step, failure.read_text(encoding="utf-8", errors="replace").strip()
    if rows:
        return State.STOPPED, step, ""
    return State.WAITING, 0, ""


# ------------------------------------------------------------------------------------------------------ a table of runs
class Records:
    """A sequence of runs in the order in which they were named or found; a notebook shows it as a table."""

    def __init__(self, runs: Sequence[Run], folders: Sequence[pathlib.Path]) -> None:
        self._records: list[Record] = []
        names = labels(runs)
        for run, folder, name, settings in zip(runs, folders, names, differing(runs), strict=True):
            label = name
            if names.count(name) > 1:  # a run and its copy have one name
                label = str(folder)
            result = finished(folder, digest(run))
            state, step, detail = state_of(run, folder, result)
            record = Record(label, run, folder, state, step, detail, settings, {})
            if result is not None:
                record = replace(record, scores=result.scores, parameters=result.parameters, seconds=result.seconds)
            self._records.append(record)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __repr__(self) -> str:
        return f"Records({', '.join(record.label for record in self)})"

    def _repr_markdown_(self) -> str:
        return html.escape(self.text(), quote=False)

    def rows(self) -> list[dict[str, object]]:
        """Return `Record.row` of all runs, each with all columns; None for missing values."""
        columns: dict[str, None] = {}
        for record in self:
            columns |= dict.fromkeys(record.row())
        columns.pop("folder", None)
        columns["folder"] = None  # the last column
        return [{**columns, **record.row()} for record in self]

    def frame(self) -> "pandas.DataFrame":
        """Return `rows` as a DataFrame.  Raises ValueError without pandas."""
        with optional("records", "polyhead[report]"):
            import pandas
        return pandas.DataFrame(self.rows())

    def best(self) -> dict[str, Record]:
        """Return the finished run with the best main metric of each split, NaN aside.

        Empty if the runs have different tasks, other than in `split_seed`: their scores cannot be compared.
        """
        scored = []
        tasks = set()
        for record in self:
            if record.scores:
                scored.append(record)
                tasks.add(json.dumps({**to_dict(record.run.task, semantic=True), "split_seed": 0}))
        # Scores of other data, or of one run alone, have no best.
        if len(tasks) != 1 or len(scored) < 2:
            return {}
        gain = scored[0].run.task.gain
        best: dict[str, Record] = {}
        for split in self.splits():
            gains: dict[int, float] = {}
            for index, record in enumerate(scored):
                score = record.score(split)
                if score is not None and not math.isnan(score):
                    gains[index] = gain(score)
            if len(gains) > 1:
                best[split] = scored[max(gains, key=gains.__getitem__)]
        return best

    def splits(self) -> list[str]:
        """Return the splits on which any run was scored."""
        splits: dict[str, None] = {}
        for record in self:
            splits |= dict.fromkeys(record.scores)
        return list(splits)

    def cells(self, *, states: bool = False) -> list[dict[str, str]]:
        """Return the cells of a table: the run, its state (if not all are done, or by `states`), its scores by split.

        A star marks the best score of a split, in every run that has it.
        """
        best = self.best()
        columns: dict[str, str] = {}
        has_states = states
        for record in self:
            has_states = has_states or record.state is not State.DONE
            for split in record.scores:
                columns[f"{split} {record.run.task.metric}"] = ""
        rows = []
        for record in self:
            row = {"run": record.label}
            if has_states:
                row |= {"state": str(record.state), "step": f"{record.step}/{record.run.train.steps}"}
            row |= columns
            for split in record.scores:
                text = record.score_text(split)
                if split in best and record.score(split) == best[split].score(split):
                    text += " *"
                row[f"{split} {record.run.task.metric}"] = text
            rows.append(row)
        return rows

    def text(self, form: str = "md") -> str:
        """Return the table as `md`, `latex`, `csv` or `json`; the last two have every number and setting."""
        one_of("records", "format", form, FORMATS)
        if form == "json":
            return json.dumps(legal(self.rows()), indent=1) + "\n"
        if form == "csv":
            return str(self.frame().to_csv(index=False))
        cells = self.cells()
        if form == "latex":
            with optional("records", "polyhead[report]"):
                import pandas
            return str(pandas.DataFrame(cells).to_latex(index=False, escape=True))
        head = list(cells[0])
        lines = [" | ".join(head), "|".join(["---"] * len(head))]
        for row in cells:
            lines.append(" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row.values()))
        return "| " + " |\n| ".join(lines) + " |\n"


# --------------------------------------------------------------------------------------------------------- finding runs
def records(*folders: str | pathlib.Path, caller: str = "records") -> Records:
    """Return the runs in these folders at any depth, each once, sorted by settings; a folder may itself be a run.

    A folder may also be the name of a trained model.

    Raises:
        ValueError: For no run; the text begins with `caller`.
    """
    run_by_folder: dict[pathlib.Path, tuple[Run, pathlib.Path]] = {}
    for folder in folders or ("runs",):
        if not isinstance(folder, str | pathlib.Path):
            raise ValueError(f"{caller}: give folders, one argument each, got {folder!r:.60}")
        paths, runs = [], []
        root = run_folder.run_path(folder)
        for path in runs_in(root, caller):
            try:
                runs.append(read_config(path))
                paths.append(path)
            except ValueError as error:
                if path == root:
                    raise
                print_notice(f"polyhead: left out: {error}")
        for index in sorted_by_settings(runs, paths):
            run_by_folder.setdefault(paths[index].resolve(), (runs[index], paths[index]))
    if not run_by_folder:
        raise ValueError(f"{caller}: no run here can be read")
    return Records(*zip(*run_by_folder.values(), strict=True))


def sorted_by_settings(runs: Sequence[Run], folders: Sequence[pathlib.Path]) -> list[int]:
    """Return the order by folder, name and the fields in which runs differ, numbers by size."""
    settings = differing(runs)

    def key(index: int) -> tuple[object, ...]:
        values: list[tuple[float | int, str]] = []
        for value in settings[index].values():
            if isinstance(value, int | float):
                values.append((value, ""))
            else:  # texts come after all numbers: the two cannot be compared
                values.append((math.inf, str(value)))
        return folders[index].parent, runs[index].name, values

    return sorted(range(len(runs)), key=key)


def of_sweep(runs: Sequence[Run], folder: str | pathlib.Path) -> Records:
    """Return the runs of a sweep, including those that have not started."""
    return Records(runs, [folder_in_sweep(run, folder) for run in runs])


def runs_in(folder: pathlib.Path, caller: str) -> list[pathlib.Path]:
    """Return the run folders in `folder`; config.json of other programs is left out.  Raises ValueError for none."""
    if not folder.exists():
        raise ValueError(f"{caller}: {folder} does not exist; trained models: polyhead list models")
    if not folder.is_dir():
        raise ValueError(f"{caller}: {folder} is no folder")
    if (folder / CONFIG).is_file():
        return [folder]
    folders = []
    for path in sorted(folder.rglob(CONFIG)):
        if '"Run"' in path.read_text(encoding="utf-8", errors="replace"):
            folders.append(path.parent)
    if not folders:
        raise ValueError(f"{caller}: no run lies in {folder}")
    return folders
