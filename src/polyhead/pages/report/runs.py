"""The data of a report: run folders, grouped over seeds, with the floors and the ceiling of their task.

Every number is read from a run folder or computed from the task.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyhead import config as configs
from polyhead.analysis.labels import with_field
from polyhead.config import Mechanism, Model, Run, Task, TransformerConfig, digest, serial, to_dict
from polyhead.tasks.task import Score
from polyhead.train.store import folder as store, shipped
from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.store.state import State, read_end

NAMES = {"Hyla": "HYLA"}
CHOICES = ("normalise", "act", "value_depth", "relations", "relation_act", "symmetric", "relation_init")
SYMBOLS: dict[type, str] = {
    configs.PositionSymbols: "symbols by position",
    configs.RelativeSymbols: "symbols by offset",
    configs.SymbolicAttention: "symbols from a library",
    configs.RelationalSymbols: "symbols by neighbours",
}
SPLITS = ("iid", "compositional", "novel")
"""The order of splits in tables."""
HEADLINE = ("compositional", "novel", "*", "iid", "validation", "train")
"""Splits by how informative their score is, best first.  `*`: names of a user's own."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One run folder: its configuration and rows, and its result if it is finished.

    `failure`: why its last worker ended, for example because it diverged; "" if it may be resumed.
    """

    folder: pathlib.Path
    run: Run
    rows: tuple[dict[str, Any], ...]
    result: store.Result | None
    notes: tuple[str, ...]
    failure: str = ""

    @property
    def step(self) -> int:
        """The number of trained steps."""
        return self.result.steps if self.result else max((row["step"] for row in self.rows), default=0)

    def curve(self, kind: str, value: str, split: str | None = None) -> tuple[list[int], list[float]]:
        """Steps and values of one column of metrics.jsonl."""
        rows = [r for r in self.rows if r.get("kind") == kind and (split is None or r.get("split") == split)]
        points = [(r["step"], float(r[value])) for r in rows if isinstance(r.get(value), (int, float))]
        return [step for step, _ in points], [y for _, y in points]


@dataclass(frozen=True)
class Summary:
    """A mean and standard error, over seeds or over the test sequences of a single seed (`over`).

    `count`: for a floor, the number of sequences.
    """

    mean: float
    error: float | None
    values: tuple[float, ...]
    over: str
    count: int = field(default=0, compare=False)

    @property
    def n(self) -> int:
        return len(self.values)


def summary(values: Sequence[float], error: float | None) -> Summary:
    """The summary of the values of several seeds, or of one with the standard error `error` over sequences."""
    if len(values) > 1:
        # NumPy's mean of three times 0.4 is not 0.4: there would be a spread.  (max and min of 0.4 and NaN are 0.4.)
        if len(set(values)) == 1 and math.isfinite(values[0]):
            return Summary(values[0], 0.0, tuple(values), "seeds")
        spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
        return Summary(float(np.mean(values)), spread, tuple(values), "seeds")
    return Summary(values[0], None if error is None else float(error), tuple(values), "sequences")


Table = dict[str, dict[str, Summary]]
"""Floors and ceiling, by name and split."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seeds."""

    label: str
    kind: str  # "softmax", "linear", "hyla" or "mixture": decides the colour
    entries: tuple[Entry, ...]

    @property
    def finished(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.result is not None)

    @property
    def task(self) -> Task:
        return self.entries[0].run.task

    def score(self, split: str) -> Summary | None:
        """The task's metric on a split, or None if no finished run measured it."""
        metric = self.task.metric
        found = [e.result.scores[split] for e in self.finished if e.result and metric in e.result.scores.get(split, {})]
        if not found:
            return None
        return summary([float(scores[metric]) for scores in found], found[0].get(f"{metric}_se"))

    def mean(self, name: str) -> float | None:
        """The mean over finished runs of a number in result.json."""
        values = [float(getattr(entry.result, name)) for entry in self.finished]
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint in a report.  `note`: why nothing of it is shown, or empty."""

    entry: Entry
    group: SeedGroup
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.group.label}, seed {self.entry.run.seed}"


def reason(entry: Entry, what: str, why: object) -> str:
    """The note of a checkpoint that cannot be shown, in one line."""
    return f"{entry.folder.name}: no {what} ({' '.join(str(why).split())})"


def read(folders: Iterable[str | pathlib.Path]) -> list[Entry]:
    """Read run folders, each run once.

    Raises ValueError for no folders, a folder that is not a run, a damaged file, or different tasks.
    """
    entries: list[Entry] = []
    for folder in folders:
        entry = _entry(store.place(folder))
        twin = next((e for e in entries if digest(e.run) == digest(entry.run)), None)
        if twin is None:
            entries.append(entry)
            continue
        note = f"{entry.folder.name} is the same run as {twin.folder.name} and counts once."
        better = entry if entry.result and not twin.result else twin
        entries[entries.index(twin)] = dataclasses.replace(better, notes=(*better.notes, note))
    if not entries:
        raise ValueError("report: at least one run folder was wanted but none came")
    _same_task(entries)
    return entries


def _entry(folder: pathlib.Path) -> Entry:
    if not folder.is_dir():
        raise ValueError(f"report: {folder} is not a run folder")
    run, result = store.read_config(folder), store.read_result(folder)
    rows = tuple(store.read_metrics(folder))
    notes = []
    state, said = (None, "") if result else read_end(folder) or (None, "")
    failure = said.partition(";")[0] if state is State.FAILED else ""
    path = folder / store.METRICS
    lines = [line for line in path.read_bytes().splitlines() if line.strip()] if path.is_file() else []
    if len(lines) > len(rows):
        notes.append(
            f"{folder.name}: {len(lines) - len(rows)} of {len(lines)} lines of {store.METRICS} cannot be read."
        )
    keep, wanted = store.expected(run.train.steps, _vouched(folder), result)
    if (lost := wanted - sum(map(keep, rows))) > 0 and not _thinned(run):
        notes.append(f"{folder.name}: {lost} rows of {store.METRICS} are lost: there are gaps in its curves.")
    if result is None:
        done = max((row["step"] for row in rows), default=0)
        steps = f"{done:,} of {run.train.steps:,} steps"
        how = f"failed after {steps} ({failure})" if failure else f"is unfinished ({steps})"
        notes.append(f"{folder.name} {how}: curves only, not in the table.")
    elif not all(_numbers(scores) for scores in result.scores.values()):
        raise ValueError(f"report: {folder / 'result.json'} has scores that are not numbers")
    elif any(not math.isfinite(v) for scores in result.scores.values() for v in scores.values()):
        notes.append(f"{folder.name} has scores that are not finite: it diverged or could not be evaluated.")
    return Entry(folder, run, rows, result, tuple(notes), failure)


def _thinned(run: Run) -> bool:
    """Whether the run comes with polyhead: of its training a row in a thousand steps was kept, on purpose."""
    return digest(run) in {about["digest"] for about in shipped.models().values()}


def _vouched(folder: pathlib.Path) -> int:
    """The number of rows in metrics.jsonl by the last checkpoint, or 0 without a readable checkpoint."""
    try:
        return int(read_metadata(folder / store.CHECKPOINT).get("rows", 0))
    except ValueError:
        return 0


def _numbers(scores: object) -> bool:
    return isinstance(scores, dict) and all(isinstance(v, (int, float)) for v in scores.values())


def _same_task(entries: Sequence[Entry]) -> None:
    """Raise a ValueError unless all runs are on one task; the seeds of the split may differ."""
    first = entries[0]
    wanted = flat(to_dict(_unseeded(first.run).task, semantic=True))
    for entry in entries[1:]:
        came = flat(to_dict(_unseeded(entry.run).task, semantic=True))
        for name in sorted(wanted.keys() | came.keys()):
            if wanted.get(name) != came.get(name):
                raise ValueError(
                    f"report: runs of one task were wanted but {name} is {wanted.get(name)} in {first.folder.name} "
                    f"and {came.get(name)} in {entry.folder.name}"
                )


def _unseeded(run: Run) -> Run:
    return dataclasses.replace(run, seed=0, task=with_field(run.task, "split_seed", 0))


def flat(values: object) -> dict[str, str]:
    """Nested JSON values in words.

    >>> flat({"train": {"lr": 0.001, "betas": [0.9, 0.99]}})
    {'train.lr': '0.001', 'train.betas': '[0.9, 0.99]'}
    """
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in serial.flat(values).items()}


# -------------------------------------------------------------------------------------------------------------- groups
def groups(entries: Sequence[Entry]) -> list[SeedGroup]:
    """Entries grouped by configuration without seeds, in the given order; labels are extended until they are unique."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(digest(_unseeded(entry.run)), []).append(entry)
    members = [tuple(group) for group in found.values()]
    names = [mechanism(group[0].run.model) for group in members]
    made = []
    for name, group in zip(names, members, strict=True):
        run, twins = group[0].run, [g[0].run for g, other in zip(members, names, strict=True) if other == name]
        made.append(SeedGroup(name + _difference(run, twins), _kind(run.model), group))
    return made


def headline(found: Sequence[SeedGroup]) -> str:
    """The split of the headline: the most informative one on which a finished run has a score."""
    offered = in_order(found[0].task.splits, HEADLINE)
    return next((split for split in offered if any(group.score(split) for group in found)), offered[0])


def in_order(splits: Sequence[str], order: Sequence[str]) -> list[str]:
    """`splits` in that order.  `novel_stripes` is beside `novel`; other names are at `*`, or at the end."""

    def place(split: str) -> int:
        return next((order.index(kind) for kind in (split, split.partition("_")[0], "*") if kind in order), len(order))

    return sorted(splits, key=place)


def mechanism(model: Model) -> str:
    """ "HYLA", "Linear (normalise rms_heads)", "Softmax 4 + HYLA 4", or one such name per layer.

    If encoder and decoder differ: "Softmax 2 + Relational 2, decoder Softmax".
    """
    if not isinstance(model, TransformerConfig):
        return type(model).__name__.removesuffix("Config")
    layers = [_heads(model.layer_heads(i)) for i in range(model.layers)]
    name = layers[0] if len(set(layers)) == 1 else ", then ".join(layers)
    encoder = name if model.encoder is None else mechanism(model.encoder)
    return name if encoder == name else f"{encoder}, decoder {name}"


def _heads(heads: Sequence[Mechanism]) -> str:
    names = []
    for group in heads:
        default: Any = type(group)()
        changed = [n for n in CHOICES if getattr(group, n, None) != getattr(default, n, None)]
        options = [_choice(name, getattr(group, name)) for name in changed]
        symbols = type(getattr(group, "symbols", None))
        options += [SYMBOLS[symbols]] if symbols is not type(getattr(default, "symbols", None)) else []
        name = NAMES.get(type(group).__name__, type(group).__name__)
        count = f" {group.heads}" if len(heads) > 1 else ""
        names.append(name + count + (f" ({', '.join(options)})" if options else ""))
    return " + ".join(names)


def _choice(name: str, value: object) -> str:
    """A field of a mechanism as text: "symmetric", "3 relations", "value depth 2"."""
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{value} {words}" if name == "relations" else f"{words} {value}"


def _kind(model: Model) -> str:
    if not isinstance(model, TransformerConfig):
        return type(model).__name__.removesuffix("Config").lower()
    stacks = [stack for stack in (model, model.encoder) if isinstance(stack, TransformerConfig)]
    kinds = {type(g).__name__.lower() for stack in stacks for i in range(stack.layers) for g in stack.layer_heads(i)}
    return kinds.pop() if len(kinds) == 1 else "mixture"


def _difference(run: Run, twins: Sequence[Run]) -> str:
    """The settings that distinguish a run from others with the same label: " · lr 0.003".

    These are the first three settings in which another run differs, and further ones until the run is unique.
    """
    mine = flat(to_dict(_unseeded(run), semantic=True))
    others = [flat(to_dict(_unseeded(twin), semantic=True)) for twin in twins]
    others = [other for other in others if other != mine]
    names = [n for n in mine if any(other.get(n) != mine[n] for other in others)]
    told = names[:3]
    for name in names[3:]:
        alike = [other for other in others if all(other.get(n) == mine[n] for n in told)]
        told += [name] if any(other.get(name) != mine[name] for other in alike) else []
    return "".join(f" · {name.rpartition('.')[2]} {mine[name]}" for name in told)


def unequal(found: Sequence[SeedGroup]) -> list[str]:
    """Settings other than the heads that differ between groups: "train.lr: 0.001 (HYLA), 0.003 (Softmax)"."""
    flats = [flat(to_dict(_unseeded(group.entries[0].run), semantic=True)) for group in found]
    every = {name for values in flats for name in values if not name.startswith(("model.heads", "model.kind"))}
    if len({values["model.kind"] for values in flats}) > 1:  # only fields that all kinds of models have
        every = {name for name in every if all(name in values for values in flats)}
    lines = []
    for name in sorted(every):
        if len({values.get(name) for values in flats}) > 1:
            each = [f"{values.get(name)} ({group.label})" for values, group in zip(flats, found, strict=True)]
            lines.append(f"{name}: {', '.join(each)}")
    return lines


# ------------------------------------------------------------------------------------------------- floors and ceiling
def baselines(found: Sequence[SeedGroup], splits: Sequence[str], *, sequences: int, progress: Progress) -> Table:
    """Floors and ceiling of the task, averaged over the runs' seeds of the split; {} for a task without floors.

    Each split has sequences of its own, so that `Score.over` may take their errors as independent.
    """
    tasks = list(dict.fromkeys(entry.run.task for group in found for entry in group.entries))
    table: Table = {}
    asked = max(100, sequences // len(tasks))
    for split in splits:
        scores: dict[str, list[Score]] = {}
        for seed, task in enumerate(tasks):
            measure = getattr(task, "floors", None)
            if measure is None:
                return {}
            progress(f"floors and ceiling, {split}")
            for name, score in measure(split, sequences=asked, seed=seed).items():
                scores.setdefault(name, []).append(score)
        count = sum(min(asked, asked if (held := task.count(split)) is None else held) for task in tasks)
        for name, each in scores.items():
            whole = Score.over(each)
            error = whole.standard_error if whole.count else None  # an exact floor has no error
            means = tuple(score.mean for score in each)
            table.setdefault(name, {})[split] = Summary(whole.mean, error, means, "sequences", count)
    return table
