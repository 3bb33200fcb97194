"""Language models in the course of training: bits per byte and perplexity over tokens, and what comes of them.

Runs that read different texts are drawn, but no claim is put to them.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from polyhead.analysis import figures
from polyhead.papers.dual.curves import Panel
from polyhead.papers.hyla.claims import Estimate, Verdict
from polyhead.papers.language import claims as claims_lm
from polyhead.papers.language.models import ROWS
from polyhead.papers.outcome import Outcome, both, by_model, numbers, scores, setting_text
from polyhead.papers.study import Cell, Point, Study, label
from polyhead.tasks import Text
from polyhead.tasks.text.tokens import RECORD

Named = Mapping[str, Cell]
Claim = Callable[[Named, Mapping[str, float]], list[Verdict]]
"""Cells by model and the floors of the held-out text."""

ZLIB = 1.81  # bits per byte of all sources of Python 3.11's library in one stream, level 9
MOST = 1 << 24  # tokens that are compressed
ENOUGH = 2.2  # bits per byte that minutes on a CPU must reach
LEVELS = {
    "paper": (30.0, 27.0, 24.0, 21.0, 18.0, 15.0),
    "small": (200.0, 150.0, 100.0, 80.0, 60.0, 50.0, 40.0, 30.0),
    "smoke": (310.0, 305.0, 300.0),
}
"""Perplexities of the token-efficiency table."""
SEEN = "standard errors over seeds, a dot per seed"


def fingerprint(point: Point) -> str:
    """Of the text that a run was trained on and scored with, as its folder says."""
    try:
        return str(json.loads((point.result.folder / RECORD).read_bytes())["fingerprint"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return "unknown"


def one_text(study: Study) -> tuple[bool, str]:
    """Whether all runs of a study read the same text, and a line that says so."""
    found = sorted({fingerprint(point) for point in study.points})
    data = ", ".join(sorted({point.run.task.data for point in study.points if isinstance(point.run.task, Text)}))
    if len(found) == 1 and found[0] != "unknown":
        return True, f"Text: {data}, fingerprint {found[0]}. Scores can be compared where it is the same."
    return False, f"Texts of several fingerprints ({', '.join(found)}) of {data}: no claim is put to these runs."


def seen(run: Any) -> int:
    """Tokens of one update."""
    return int(run.train.batch_size * run.task.length)


def course(cell: Cell, metric: str | None = None) -> dict[float, list[float]]:
    """Scores of a cell's seeds on validation text by millions of tokens."""
    size = seen(cell.points[0].run)
    return {step * size / 1e6: values for step, values in cell.course("validation", metric).items()}


def single(cell: Cell, split: str = "iid") -> Estimate:
    """Its score over seeds; of a single run with the error over sequences."""
    if len(cell.points) > 1:
        return cell.score(split)
    (point,) = cell.points
    error, count = (point.score(split, name) for name in (f"{point.run.task.metric}_se", "sequences"))
    return Estimate(point.score(split), error, count - 1.0)


def floors(study: Study) -> dict[str, float]:
    """Bits per byte of compressors on all of the text that is reported, or as much as they take in a minute."""
    task = study.points[0].run.task
    assert isinstance(task, Text)
    sequences = min(task.count("iid") or 1, MOST // task.length)
    return {name: score.mean for name, score in task.floors("iid", sequences=sequences).items()}


def curves(claim: Claim) -> Callable[[Study, pathlib.Path], Outcome]:
    """Bits per byte over tokens, a line per kind of heads, beside zlib, and a table of what they end at."""

    def draw(study: Study, folder: pathlib.Path) -> Outcome:
        cells = by_model(study)[()]
        same, text = one_text(study)
        levels = floors(study)
        series = {label(model): course(cell) for model, cell in cells.items()}
        for path in both(study.figure, folder):
            figures.lines(
                [("", series, {"zlib": levels["zlib"]})],
                *(path,),
                x_label="million tokens",
                y_label="bits per byte",
                log_x=True,
            )
        compressed = ", ".join(f"{name} {level:.3f}" for name, level in levels.items())
        notes = (text, f"Bits per byte of the same held-out text by what trains no network: {compressed}.")
        return Outcome(
            pictures=((study.figure, f"Bits per byte on validation text in the course of training; {SEEN}."),),
            **table({model: (label(model), cell) for model, cell in cells.items()}, "model", notes),
            verdicts=tuple(claim(cells, levels)) if same else (),
        )

    return draw


def bytes_claims(cells: Named, levels: Mapping[str, float]) -> list[Verdict]:
    """Of `lm-bytes`."""
    ends = {model: single(cell) for model, cell in cells.items()}
    return claims_lm.reaches(ends, ENOUGH) + claims_lm.kinds(scores(cells, "iid"))


def long_claims(cells: Named, levels: Mapping[str, float]) -> list[Verdict]:
    """Of `lm-long`."""
    zlib = {"the same files": levels["zlib"], "all of the library": ZLIB}
    return claims_lm.below({model: single(cell) for model, cell in cells.items()}, zlib)


def fig_6_claims(cells: Named, levels: Mapping[str, float]) -> list[Verdict]:
    """Of Fig. 6."""
    return claims_lm.fig_6(scores(cells, "iid"))


def table(cells: Mapping[Any, tuple[str, Cell]], axis: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """A line per cell: what it ends at, how large it is, how long it took."""
    measured = (
        ("bits per byte, validation", "validation", None),
        ("bits per byte, iid", "iid", None),
        ("perplexity, iid", "iid", "perplexity"),
        ("accuracy, iid", "iid", "accuracy"),
    )
    rows, found = [], {}
    for place, (name, cell) in cells.items():
        values = {head: cell.score(split, metric) for head, split, metric in measured}
        rows.append((name, *map(str, values.values()), *cost(cell)))
        found[str(place)] = {head: numbers(value) for head, value in values.items()}
    settings = sorted({setting_text(cell) for _, cell in cells.values()})
    ran = {name for name, _ in cells.values()}
    choices = (f"{row.label}: {row.choice}." for row in ROWS.values() if row.choice and row.label in ran)
    head = (axis, *(head for head, _, _ in measured), *COST)
    notes = (*notes, *choices, f"Settings: {'; '.join(settings)}.")
    return {"head": head, "rows": tuple(rows), "numbers": found, "notes": notes}


COST = ("parameters", "million tokens", "minutes of a run")


def cost(cell: Cell) -> tuple[str, ...]:
    """Of a run: its size, its tokens, and how long it took."""
    run = cell.points[0].run
    minutes = sum(point.result.seconds for point in cell.points) / 60 / len(cell.points)
    tokens = run.train.steps * seen(run) / 1e6
    return f"{cell.points[0].result.parameters:,}", f"{tokens:,.2f}", f"{minutes:.1f}"


# ------------------------------------------------------------------------------------------------------ dual attention
def reached(course: Mapping[float, float], level: float) -> float | None:
    """Where a falling course first comes to `level`, between its points along straight lines over the logarithm of
    where they are; None if it does not.

    >>> reached({1.0: 4.0, 4.0: 2.0}, 3.0), reached({1.0: 4.0, 4.0: 2.0}, 1.0)
    (2.0, None)
    """
    before: tuple[float, float] | None = None
    for x, y in sorted(course.items()):
        if y <= level:
            if before is None or before[1] == y:
                return x
            part = (before[1] - level) / (before[1] - y)
            return math.exp(math.log(before[0]) + part * (math.log(x) - math.log(before[0])))
        before = x, y
    return None


def needs(cell: Cell, level: float) -> Estimate | None:
    """Logarithm of the millions of tokens until the perplexity of validation text is `level`; None if a seed never
    comes there."""
    found = {}
    for point in cell.points:
        losses = {step * seen(point.run) / 1e6: loss for step, loss in point.course("validation", "loss").items()}
        if (at := reached(losses, math.log(level))) is None:
            return None
        found[point.run.seed] = math.log(at)
    return Estimate.of(found)


def dual_lm(study: Study, folder: pathlib.Path) -> Outcome:
    """Perplexity over tokens, a panel per width, and the tokens until each of a row of perplexities."""
    cells = by_model(study, "width")
    panels: list[Panel] = []
    for (width,), by in cells.items():
        series = {label(m): {x: list(map(math.exp, v)) for x, v in course(c, "loss").items()} for m, c in by.items()}
        panels.append((f"width {width}", series, {}))
    for path in both(study.figure, folder):
        figures.lines(panels, path, x_label="million tokens", y_label="perplexity", log_x=True, log_y=True)
    same, text = one_text(study)
    tokens = {
        (width, level): {m: e for m, cell in by.items() if (e := needs(cell, level)) is not None}
        for (width,), by in cells.items()
        for level in LEVELS[study.scale]
    }
    named = {f"width {width}, perplexity {level:g}": by for (width, level), by in tokens.items()}
    ends = {f"width {width}": scores(by, "iid") for (width,), by in cells.items()}
    return Outcome(
        pictures=((study.figure, f"Perplexity of validation text in the course of training; {SEEN}."),),
        **_efficiency(cells, tokens, study.scale, text),
        verdicts=tuple(claims_lm.sooner(named, ends)) if same else (),
    )


def _efficiency(
    cells: Mapping[tuple[Any, ...], Named],
    tokens: Mapping[tuple[Any, float], Mapping[str, Estimate]],
    scale: str,
    text: str,
) -> dict[str, Any]:
    """The token-efficiency table: a line per width and model."""
    levels = [level for level in LEVELS[scale] if any(tokens[width, level] for (width,) in cells)]  # that some reach
    printed = all(width in claims_lm.TOKENS for (width,) in cells)
    rows, found = [], {}
    for (width,), by in cells.items():
        for model, cell in by.items():
            mine = {level: tokens[width, level].get(model) for level in levels}
            until = ["–" if e is None else f"{math.exp(e.mean):.3g}" for e in mine.values()]
            paper = [_printed(width, model), f"{claims_lm.PERPLEXITY[width][model]}"] if printed else []
            ends = (cell.score("validation", "perplexity"), cell.score("iid"))
            rows.append((str(width), label(model), *until, *map(str, ends), *paper, *cost(cell)))
            known = {f"log of million tokens to {level:g}": numbers(e) for level, e in mine.items() if e is not None}
            found[f"width {width}, {model}"] = {
                **known,
                "perplexity": numbers(ends[0]),
                "bits per byte": numbers(ends[1]),
            }
    head = ("width", "model", *(f"to {level:g}" for level in levels), "perplexity, validation", "bits per byte, iid")
    head += ("paper: billion tokens to 30, 27, 24, 21, 18, 15", "paper: perplexity") if printed else ()
    settings = sorted({setting_text(cell) for by in cells.values() for cell in by.values()})
    notes = (
        text,
        "Columns named by a perplexity: millions of tokens until validation text has it, the mean over seeds; – where "
        "a seed does not come there.",
        *(f"{row.label}: {row.choice}." for name, row in ROWS.items() if name == "dual"),
        *(() if printed else _papers()),
        f"Settings: {'; '.join(settings)}.",
    )
    return {"head": (*head, *COST), "rows": tuple(rows), "numbers": found, "notes": notes}


def _printed(width: int, model: str) -> str:
    values = claims_lm.TOKENS[width][model]
    return ", ".join(f"{values[level]:.2f}" if level in values else "–" for level in LEVELS["paper"])


def _papers() -> tuple[str, ...]:
    """What the paper prints, where ours are other sizes."""
    return tuple(
        f"Paper, width {width}, {label(model)}: perplexity {value} on FineWeb-Edu; billion tokens to 30, 27, 24, 21, "
        f"18 and 15: {_printed(width, model)}."
        for width, by in claims_lm.PERPLEXITY.items()
        for model, value in by.items()
    )


# ------------------------------------------------------------------------------------------------- parts of a model
def swiglu(study: Study, folder: pathlib.Path) -> Outcome:
    """Bits per byte over tokens by the activation of the feed-forward layers."""
    cells = {place[0]: cell for place, cell in study.cells("feedforward").items()}
    same, text = one_text(study)
    for path in both(study.figure, folder):
        panel: Panel = ("", {name: course(cell) for name, cell in cells.items()}, {})
        figures.lines([panel], path, x_label="million tokens", y_label="bits per byte", log_x=True)
    return Outcome(
        pictures=((study.figure, f"Bits per byte on validation text in the course of training; {SEEN}."),),
        **table({name: (name, cell) for name, cell in cells.items()}, "feed-forward layers", (text,)),
        verdicts=tuple(claims_lm.gated(scores(cells, "iid"))) if same else (),
    )


def norms(study: Study, folder: pathlib.Path) -> Outcome:
    """Bits per byte at the end over the learning rate, norms before and after."""
    cells = {(order, rate): cell for (order, rate), cell in study.cells("norm order", "lr").items()}
    same, text = one_text(study)
    ends: dict[float, dict[str, Estimate]] = {}
    series: dict[str, dict[float, list[float]]] = {}
    for (order, rate), cell in cells.items():
        ends.setdefault(rate, {})[order] = cell.score("iid")
        series.setdefault(f"{order}-norm", {})[rate] = list(cell.score("iid").values.values())
    for path in both(study.figure, folder):
        figures.lines([("", series, {})], path, x_label="learning rate", y_label="bits per byte", log_x=True)
    named = {place: (f"{place[0]}-norm, rate {place[1]:g}", cell) for place, cell in cells.items()}
    return Outcome(
        pictures=((study.figure, f"Bits per byte of held-out text at the end of training; {SEEN}."),),
        **table(named, "norms", (text,)),
        verdicts=tuple(claims_lm.orders(ends)) if same else (),
    )
