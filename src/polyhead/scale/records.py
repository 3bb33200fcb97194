"""Runs on the disk as a table of names, settings, states and scores; as Markdown, CSV, LaTeX or JSON."""

import csv
import io
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polyhead.config import Run, digest, to_dict
from polyhead.config.serial import legal
from polyhead.scale.sweep.naming import differing, labels, setting
from polyhead.scale.sweep.status import place_of, state_of
from polyhead.spec.notebook import as_table
from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of
from polyhead.train.store import folder as run_folder, shipped
from polyhead.train.store.folder import CONFIG, finished, read_config
from polyhead.train.store.state import State

if TYPE_CHECKING:
    import pandas

Cells = Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """A run on the disk.

    `settings`: the fields in which the runs of the table differ.  `scores[split]`: for a finished run, its loss, and
    the mean and standard error `<metric>_se` of each metric.
    """

    label: str
    run: Run
    folder: pathlib.Path
    state: State
    step: int
    detail: str
    settings: Mapping[str, object]
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    parameters: int | None = None
    seconds: float | None = None

    def row(self) -> dict[str, object]:
        """The run as a table row: settings, state, step, and `SPLIT METRIC` with `SPLIT METRIC_se` for every score."""
        found = {f"{split} {name}": value for split, by in self.scores.items() for name, value in by.items()}
        about = {"state": str(self.state), "step": self.step, "steps": self.run.train.steps}
        size = {"parameters": self.parameters, "seconds": self.seconds}
        return {"run": self.label, **self.settings, **about, **found, **size, "folder": str(self.folder)}

    def score(self, split: str) -> float | None:
        """The main metric of its task on `split`."""
        return self.scores.get(split, {}).get(self.run.task.metric)


class Records:
    """A sequence of runs in the order in which they were named or found; a notebook shows it as a table."""

    def __init__(self, runs: Sequence[Run], folders: Sequence[pathlib.Path]) -> None:
        self._all: list[Record] = []
        named = labels(runs)  # a run and its copy have one name
        named = [str(folders[i]) if named.count(name) > 1 else name for i, name in enumerate(named)]
        for run, place, label, fields in zip(runs, folders, named, differing(runs), strict=True):
            state, step, detail = state_of(run, place)
            record = Record(label, run, place, state, step, detail, fields)
            if state is State.DONE and (result := finished(place, digest(run))) is not None:
                size, seconds = result.parameters, result.seconds
                record = replace(record, detail="", scores=result.scores, parameters=size, seconds=seconds)
            self._all.append(record)

    def __getitem__(self, at: int) -> Record:
        return self._all[at]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._all)

    def __repr__(self) -> str:
        return f"Records({', '.join(record.label for record in self)})"

    def _repr_html_(self) -> str:
        rows = self.cells()
        head = {"run": list(rows[0])[1:]} if rows else {}
        return as_table("Runs", {**head, **{row["run"]: list(row.values())[1:] for row in rows}})

    def rows(self) -> list[dict[str, object]]:
        """`Record.row` of all runs, each with all columns; None for missing values."""
        found = [record.row() for record in self]
        names = dict.fromkeys(name for row in found for name in row if name != "folder") | {"folder": None}
        return [{name: row.get(name) for name in names} for row in found]

    def frame(self) -> "pandas.DataFrame":
        """`rows` as a DataFrame.  ValueError without pandas."""
        with optional("Records.frame", "pandas"):
            import pandas
        return pandas.DataFrame(self.rows())

    def best(self) -> dict[str, Record]:
        """For each split, the finished run with the best main metric, nan aside; empty if the runs have different
        tasks (other than in `split_seed`)."""
        done = [record for record in self if record.scores]
        if len({_question(record.run) for record in done}) != 1 or len(done) < 2:
            return {}
        gain = done[0].run.task.gain
        found = {}
        for split in dict.fromkeys(split for record in done for split in record.scores):
            scores = [(record.score(split), record) for record in done]
            scored = [(gain(score), record) for score, record in scores if score is not None and not math.isnan(score)]
            if len(scored) > 1:
                found[split] = max(scored, key=lambda pair: pair[0])[1]
        return found

    def cells(self, mark: Callable[[str], str] = "{} *".format, *, states: bool = False) -> list[dict[str, str]]:
        """Table cells: the run, its state (if not all are done, or by `states`), and its score on every split.

        `mark` formats the best score of a split, in every run that has it.
        """
        top = {split: record.score(split) for split, record in self.best().items()}
        columns = dict.fromkeys(f"{s} {record.run.task.metric}" for record in self for s in record.scores)
        alike = all(record.state is State.DONE for record in self) and not states
        rows = []
        for record in self:
            row = {"run": record.label}
            row |= {} if alike else {"state": f"{record.state}", "step": f"{record.step}/{record.run.train.steps}"}
            row |= dict.fromkeys(columns, "")
            for split, scores in record.scores.items():
                if (score := record.score(split)) is not None:
                    error = scores.get(f"{record.run.task.metric}_se")
                    text = f"{score:.3f}" + (f" ± {error:.3f}" if error is not None else "")
                    row[f"{split} {record.run.task.metric}"] = mark(text) if score == top.get(split) else text
            rows.append(row)
        return rows

    def text(self, form: str = "md") -> str:
        """The table as `md`, `latex`, `csv` or `json`; the last two have every number and setting."""
        return FORMATS[one_of("records", "format", form, FORMATS)](self)

    def differences(self) -> list[dict[str, str]]:
        """Settings, size and scores as rows, runs as columns; for two runs also their difference."""
        names = [record.label for record in self]
        settings = self[0].settings if len(self) else ()
        cells = {name: [setting(record.settings[name]) for record in self] for name in settings}
        if any(record.state is not State.DONE for record in self):
            cells["state"] = [str(record.state) for record in self]
        numbers: dict[str, list[float | int | None]] = {
            "parameters": [record.parameters for record in self],
            "seconds": [record.seconds for record in self],
        }
        for split, metric in dict.fromkeys((s, record.run.task.metric) for record in self for s in record.scores):
            scores = [record.score(split) if record.run.task.metric == metric else None for record in self]
            numbers[f"{split} {metric}"] = scores
        cells |= {name: [_number(value) for value in values] for name, values in numbers.items()}
        rows = [{"": name, **dict(zip(names, texts, strict=True))} for name, texts in cells.items()]
        if len(self) != 2:
            return rows
        return [{**row, "difference": _difference(numbers.get(row[""], (None, None)))} for row in rows]


def records(*places: str | pathlib.Path, who: str = "records") -> Records:
    """The runs in these folders at any depth, each once, sorted by settings; a folder may itself be a run.

    A place may also be the name of a trained model that comes with polyhead.

    Raises ValueError, with `who` first, if there is no run.

    `records("runs")` shows a table in a notebook; `.text("latex")` writes it, `.frame()` is a DataFrame.
    """
    for place in places:
        if not isinstance(place, str | pathlib.Path):
            raise ValueError(f"{who}: folders were wanted, one argument each, but {place!r:.60} came")
    found: dict[pathlib.Path, tuple[Run, pathlib.Path]] = {}
    for place in places or ("runs",):
        for run, folder in _in_order(_runs_in(run_folder.place(place), who)):
            found.setdefault(folder.resolve(), (run, folder))
    return Records(*zip(*found.values(), strict=True))


def _in_order(folders: Sequence[pathlib.Path]) -> list[tuple[Run, pathlib.Path]]:
    """Runs in the same folder with the same name are sorted by the fields in which they differ, numbers by size."""
    runs = [read_config(folder) for folder in folders]

    def key(i: int) -> tuple[pathlib.Path, str, list[tuple[float | int, str]]]:
        values = [(value, "") if isinstance(value, (int, float)) else (math.inf, str(value)) for value in fields[i]]
        return folders[i].parent, runs[i].name, values

    fields = [list(each.values()) for each in differing(runs)]
    return [(runs[i], folders[i]) for i in sorted(range(len(runs)), key=key)]


def of_sweep(runs: Sequence[Run], folder: str | pathlib.Path) -> Records:
    """The runs of a sweep, including those that have not started."""
    return Records(runs, [place_of(run, folder) for run in runs])


def _runs_in(place: pathlib.Path, who: str) -> list[pathlib.Path]:
    if not place.is_dir():
        missing = f"does not exist{shipped.hint(str(place))}"
        raise ValueError(f"{who}: {place} {'is no folder' if place.exists() else missing}")
    found = [place] if (place / CONFIG).is_file() else sorted(path.parent for path in place.rglob(CONFIG))
    whole = [path for path in found if path == place or _is_run(path / CONFIG)]
    if not whole:
        raise ValueError(f"{who}: no run lies in {place}")
    return whole


def _is_run(path: pathlib.Path) -> bool:
    """Whether a config.json is one of ours."""
    return '"Run"' in path.read_text(encoding="utf-8", errors="replace")


def _question(run: Run) -> str:
    """The task of a run as text, without the seed of its splits."""
    return json.dumps({**to_dict(run.task, semantic=True), "split_seed": 0}, sort_keys=True)


def _number(value: float | int | None, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign}.3f}"


def _difference(values: Sequence[float | int | None]) -> str:
    first, second = values
    return "" if first is None or second is None else _number(second - first, "+")


def _md(found: Records) -> str:
    rows = found.cells("**{}**".format)
    lines = ["| " + " | ".join(row[name].replace("|", "\\|") for name in row) + " |" for row in rows]
    head = list(rows[0]) if rows else []
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) + "\n"


def _csv(found: Records) -> str:
    text, rows = io.StringIO(), found.rows()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(found: Records) -> str:
    return json.dumps(legal(found.rows()), indent=1) + "\n"


def _latex(found: Records) -> str:
    rows = found.cells(lambda text: f"\0{text}\1")
    head = list(rows[0]) if rows else []
    lines = [" & ".join(_escaped(cell) for cell in row) + r" \\" for row in (head, *(row.values() for row in rows))]
    columns = "l" + "r" * (len(head) - 1)
    body = [lines[0], r"\hline", *lines[1:]]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\hline", *body, r"\hline", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    text = re.sub(r"[&%$#_{}~^]", r"\\\g<0>", text.replace("\\", "/"))
    for sign, tex in SIGNS.items():
        text = text.replace(sign, tex)
    return re.sub(r"^(\\textbf{|)-(?=\d)", r"\1$-$", text)  # a minus, not a hyphen


SIGNS = {"±": r"$\pm$", "²": "$^2$", r"\~": r"\~{}", r"\^": r"\^{}", "\0": r"\textbf{", "\1": "}"}
"""Characters that must be escaped in LaTeX."""

FORMATS: dict[str, Callable[[Records], str]] = {"md": _md, "csv": _csv, "latex": _latex, "json": _json}
