"""The runs of a report: their folders, grouped over seeds, and the baselines of their task."""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.analysis.claims import Estimate, over_networks
from polyhead.analysis.labels import mechanism_label, with_field
from polyhead.config import Mechanism, Model, Run, TransformerConfig, digest, to_dict
from polyhead.config.mechanisms import COMMON_FIELDS
from polyhead.scale.sweep.naming import differing, setting, words
from polyhead.spec.values import flat
from polyhead.tasks.base import Task
from polyhead.tasks.scores import Score
from polyhead.train.stop import DIVERGED
from polyhead.train.store import folder as store

# Splits by how informative their score is, best first. `*`: names of a user's own.
SPLIT_ORDER = ("compositional", "novel", "*", "iid", "validation", "train")
LARGEST_STEP = 2**53
LARGEST_SCORE = 1e150


@dataclass(frozen=True)
class Entry:
    """One run folder: its configuration and rows, its result if it is finished, and notes on what is wrong with it.

    Attributes:
        diverged: Whether training ended because its numbers were not finite.
    """

    folder: pathlib.Path
    run: Run
    rows: tuple[dict[str, Any], ...]
    result: store.Result | None
    notes: tuple[str, ...]
    diverged: bool = False

    def curve(self, split: str | None) -> dict[int, float]:
        """The task's metric on a split, or the training loss (None), by step, without numbers that are not finite."""
        kind, column = "eval", self.run.task.metric
        if split is None:
            kind, column = "train", "loss"
        points: dict[int, float] = {}
        for row in self.rows:
            number = finite(row.get(column))
            if row.get("kind") == kind and row.get("split") == split and number is not None:
                points[row["step"]] = number
        return points


# The seeds of a run: of its network and data, and of its division.
Seeds = tuple[int, int | None]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seeds."""

    label: str
    entries: tuple[Entry, ...]

    @property
    def finished(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.result is not None)

    @property
    def task(self) -> Task:
        return self.entries[0].run.task

    def by_seeds(self, split: str) -> dict[Seeds, float]:
        """The task's metric on a split by the seeds of each finished run; NaN for a score that is not finite.

        Runs that diverged have NaN, too: without them a test would see the surviving seeds alone.
        """
        values = {}
        for entry in self.entries:
            if entry.diverged:
                values[seeds_of(entry.run)] = math.nan
        # A finished run counts before one of the same seeds that diverged.
        for entry in self.finished:
            assert entry.result is not None
            scores = entry.result.scores.get(split, {})
            if self.task.metric in scores:
                value = finite(scores[self.task.metric])
                values[seeds_of(entry.run)] = math.nan if value is None else value
        return values

    def score(self, split: str) -> Estimate | None:
        """The mean of the finite scores on a split; None if no finished run has one."""
        known = {seeds: value for seeds, value in self.by_seeds(split).items() if math.isfinite(value)}
        if not known:
            return None
        estimate = self.estimate(split, known)
        if len(known) == 1 and estimate.sampling:
            return dataclasses.replace(estimate, error=estimate.sampling)
        return estimate

    def estimate(self, split: str, values: Mapping[Seeds, float]) -> Estimate:
        """The mean of scores by seeds, with the sampling error of finite test data."""
        errors, tasks = [], []
        for entry in self.entries:
            if entry.result is not None and math.isfinite(values.get(seeds_of(entry.run), math.nan)):
                error = finite(entry.result.scores[split].get(f"{self.task.metric}_se"))
                errors.append(error or 0.0)
                tasks.append(entry.run.task)
        return over_networks(values, errors or [0.0], tasks or [self.task], split)

    def mean(self, field: str) -> float | None:
        """The mean over finished runs of a number in result.json."""
        numbers = []
        for entry in self.finished:
            number = finite(getattr(entry.result, field))
            if number is not None:
                numbers.append(number)
        if not numbers:
            return None
        return statistics.fmean(numbers)


def seeds_of(run: Run) -> Seeds:
    """The seed of a run, and that of its division into known and unseen combinations, if its task has one."""
    return run.seed, getattr(run.task, "split_seed", None)


def over_seeds(by_seed: Mapping[Any, float], error: float | None = None) -> Estimate | None:
    """The mean over seeds, None without any; `error` is that of a single network over its test sequences."""
    if not by_seed:
        return None
    estimate = Estimate.of(by_seed)
    if len(by_seed) == 1 and error is not None:
        estimate = dataclasses.replace(estimate, error=error)
    return estimate


def finite(value: object) -> float | None:
    """A number of a file as a float; None for anything else, and for numbers whose square no float holds.

    >>> finite(0.5), finite(10**400), finite(float("nan")), finite("0.5")
    (0.5, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < LARGEST_SCORE else None


# ------------------------------------------------------------------------------------------------------------- reading
def read(folders: Iterable[str | pathlib.Path]) -> list[Entry]:
    """Read run folders, each run once.

    Raises:
        ValueError: For no folders, a folder that is not a run, a damaged file, or different tasks.
    """
    entries: dict[str, Entry] = {}
    # A run may have several folders: it counts once.
    for folder in folders:
        entry = _entry(store.run_path(folder))
        key = digest(entry.run)
        if key not in entries:
            entries[key] = entry
            continue
        twin = entries[key]
        note = f"{entry.folder.name} is the same run as {twin.folder.name} and counts once."
        if twin.result or not entry.result:  # a finished one counts
            entry = twin
        entries[key] = dataclasses.replace(entry, notes=(*entry.notes, note))
    if not entries:
        raise ValueError("report: no run folder was given; name at least one")
    _check_same_task(list(entries.values()))
    return list(entries.values())


def _entry(folder: pathlib.Path) -> Entry:
    if not folder.is_dir():
        raise ValueError(f"report: {folder} is not a run folder")
    run = store.read_config(folder)
    result = store.read_result(folder)
    notes = []

    path = folder / store.METRICS
    num_lines = 0
    if path.is_file():
        num_lines = sum(1 for line in path.read_bytes().splitlines() if line.strip())
    # A step beyond all trainings, or one that is no integer, cannot be drawn.
    rows = []
    for row in store.read_metrics(folder):
        step = row.get("step")
        if isinstance(step, int) and 0 <= step <= LARGEST_STEP:
            rows.append(row)
    if num_lines > len(rows):
        notes.append(f"{folder.name}: {num_lines - len(rows)} of {num_lines} lines of {store.METRICS} are unreadable.")
    if result is None:
        last = max((row["step"] for row in rows), default=0)
        failure = folder / store.FAILURE
        diverged = False
        if failure.is_file():
            diverged = failure.read_text(encoding="utf-8", errors="replace").strip().endswith(DIVERGED)
        state = "diverged" if diverged else "is unfinished"
        notes.append(f"{folder.name} {state} ({last:,} of {run.train.steps:,} steps): its curves alone are shown.")
        return Entry(folder, run, tuple(rows), None, tuple(notes), diverged)
    for split, scores in result.scores.items():
        for name, value in scores.items():
            if finite(value) is None:
                notes.append(f"{folder.name}: {name} on {split} is not finite and is left out.")
    return Entry(folder, run, tuple(rows), result, tuple(notes))


def _check_same_task(entries: Sequence[Entry]) -> None:
    """Raise a ValueError unless all runs are on one task; the seeds of the split may differ."""
    first = entries[0]
    expected = flat(to_dict(without_seeds(first.run).task, semantic=True))
    for entry in entries[1:]:
        values = flat(to_dict(without_seeds(entry.run).task, semantic=True))
        for name in sorted(expected.keys() | values.keys()):
            if expected.get(name) != values.get(name):
                raise ValueError(
                    f"report: all runs must be on one task, but {name} is {expected.get(name)} in {first.folder.name} "
                    f"and {values.get(name)} in {entry.folder.name}; report them apart"
                )


def without_seeds(run: Run) -> Run:
    return dataclasses.replace(run, seed=0, task=with_field(run.task, "split_seed", 0))


# -------------------------------------------------------------------------------------------------------------- groups
def groups(entries: Sequence[Entry]) -> list[SeedGroup]:
    """Entries grouped by configuration without seeds, in the given order, each with a label of its own."""
    # Equal configurations but for their seeds are one group.
    members: dict[str, list[Entry]] = {}
    # Groups of one mechanism are told apart by their other settings.
    keys_by_mechanism: dict[str, list[str]] = {}
    for entry in entries:
        key = digest(without_seeds(entry.run))
        if key not in members:
            keys_by_mechanism.setdefault(mechanism(entry.run.model), []).append(key)
        members.setdefault(key, []).append(entry)
    labels: dict[str, str] = {}
    for name, keys in keys_by_mechanism.items():
        twins = [without_seeds(members[key][0].run) for key in keys]
        for key, settings in zip(keys, differing(twins), strict=True):
            labels[key] = name
            if words(settings):
                labels[key] += f" · {words(settings)}"
    return [SeedGroup(labels[key], tuple(group)) for key, group in members.items()]


def different_settings(seed_groups: Sequence[SeedGroup]) -> list[list[str]]:
    """Settings that differ between groups: one row each, [name, value of each group].

    Labels have the kinds and numbers of heads.  Of their fields, those in `COMMON_FIELDS` are compared where both have
    them.
    """
    columns = []  # of each group, its settings as text by their dotted names
    for group in seed_groups:
        settings = flat(to_dict(without_seeds(group.entries[0].run), semantic=True))
        columns.append({name: setting(value) for name, value in settings.items()})
    rows = []
    for name in sorted(set(itertools.chain(*columns))):
        values = [column.get(name, "–") for column in columns]
        compared = set(values)
        if name.startswith("model.heads"):
            if not set(name.split(".")) & set(COMMON_FIELDS):
                continue
            compared.discard("–")
        if len(compared) > 1 and name != "model.kind":
            rows.append([name, *values])
    return rows


def mechanism(model: Model) -> str:
    """ "HYLA", "Softmax 4 + HYLA 4", or one such name per layer.

    If encoder and decoder differ: "Softmax 2 + Relational 2, decoder Softmax".
    """
    if not isinstance(model, TransformerConfig):
        return type(model).__name__.removesuffix("Config")
    layers = list(map(_heads_label, map(model.layer_heads, range(model.layers))))
    if len(set(layers)) == 1:
        layers = layers[:1]
    name = ", then ".join(layers)
    if model.encoder is None or mechanism(model.encoder) == name:
        return name
    return f"{mechanism(model.encoder)}, decoder {name}"


def _heads_label(heads: Sequence[Mechanism]) -> str:
    """The names of the groups of one layer, with numbers if there are several."""
    names = []
    for group in heads:
        name = mechanism_label(type(group).__name__.lower())
        if len(heads) > 1:
            name += f" {group.heads}"
        names.append(name)
    return " + ".join(names)


# -------------------------------------------------------------------------------------------------------------- splits
def scored_splits(seed_groups: Sequence[SeedGroup]) -> list[str]:
    """The splits on which a finished run has a score, the most informative first."""
    splits = []
    for split in in_order(seed_groups[0].task.splits):
        if any(group.score(split) for group in seed_groups):
            splits.append(split)
    return splits


def headline_split(seed_groups: Sequence[SeedGroup]) -> str:
    """The split of the headline: the most informative one on which a finished run has a score."""
    return (scored_splits(seed_groups) or in_order(seed_groups[0].task.splits))[0]


def in_order(splits: Iterable[str]) -> list[str]:
    """Splits, the most informative first.  `novel_stripes` stands beside `novel`; other names at `*`."""

    def rank(split: str) -> int:
        for name in (split, split.partition("_")[0]):
            if name in SPLIT_ORDER:
                return SPLIT_ORDER.index(name)
        return SPLIT_ORDER.index("*")

    return sorted(splits, key=rank)


def baselines(seed_groups: Sequence[SeedGroup], splits: Sequence[str], sequences: int) -> dict[str, dict[str, Score]]:
    """Baselines and ceiling of the task by name and split, averaged over the divisions of the finished runs.

    Empty for a task without any.  Each split has sequences of its own, so that their errors are independent.
    """
    entries: list[Entry] = []
    finished: list[Entry] = []
    for group in seed_groups:
        entries += group.entries
        finished += group.finished
    tasks = list(dict.fromkeys(entry.run.task for entry in finished or entries))
    table: dict[str, dict[str, Score]] = {}
    for split in splits:
        scores: dict[str, list[Score]] = {}
        for seed, task in enumerate(tasks):
            measure = getattr(task, "baselines", None)
            if measure is None:
                return {}
            by_name = measure(split, sequences=max(100, sequences // len(tasks)), seed=seed)
            for name, score in by_name.items():
                scores.setdefault(name, []).append(score)
        for name, of_tasks in scores.items():
            table.setdefault(name, {})[split] = Score.over(of_tasks)
    return table
