"""A report's section on the same networks trained in full: scores, swapped codes and maps."""

import contextlib
import math
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import plotly.graph_objects as go

from polyhead.analysis.swap import CODES, swap_codes
from polyhead.config import digest
from polyhead.pages import document
from polyhead.pages.document import escape
from polyhead.pages.report import figures, headline as text
from polyhead.pages.report.codes import POINTS, CheckpointAnalysis, code_maps
from polyhead.pages.report.page import Page
from polyhead.pages.report.runs import Progress, SeedGroup, Summary, Table, baselines, groups, read, summary
from polyhead.pages.report.sections import layer_maps, legend
from polyhead.train import evaluate, load_model
from polyhead.train.store import shipped

SEQUENCES, PAIRS = 2048, 1000
LOWEST = -1.0  # least R² in the figure; the table has the numbers
WHOSE = {
    "own": "its own",
    "donor": "the donor's",
    "other": "another sequence's",
    "permuted": "the donor's, heads in another order",
    "zero": "none",
}
"""Descriptions of the code that the query token gets."""
Rows = list[dict[str, float | str]]


@dataclass(frozen=True)
class TrainedScores:
    """New scores by mechanism, floors, the rows of `swap_codes` by label and seed, and maps of the first seed."""

    found: list[SeedGroup]
    splits: list[str]
    table: Table
    swaps: dict[str, list[Rows]]
    maps: list[CheckpointAnalysis]


def measure(folders: Iterable[str | pathlib.Path], splits: Sequence[str], say: Progress) -> TrainedScores:
    """Score the models on `splits`, swap and map their codes.  A task without `contrasts` has no swaps."""
    entries, swaps = [], {}
    for entry in read(folders):
        if entry.result is None:
            raise ValueError(f"report: {entry.folder} is not finished, so it is not trained in full")
        say(f"{entry.folder.name}, trained in full: scores, swapped codes")
        run, model = load_model(entry.folder)
        size = run.train.batch_size
        count = max(1, SEQUENCES // size)
        how = partial(evaluate, batches=count, batch_size=size, seed=run.seed, precision=run.train.precision)
        scores = {s: how(model, run.task, s) for s in splits}
        entries.append(replace(entry, result=replace(entry.result, scores=scores)))
        with contextlib.suppress(ValueError):
            swaps[entry.folder] = swap_codes(model, run.task, pairs=PAIRS)
    found = groups(entries)
    by_label = {g.label: [swaps[e.folder] for e in g.entries if e.folder in swaps] for g in found}
    swapped = {label: rows for label, rows in by_label.items() if rows}
    table = baselines(found, splits, sequences=SEQUENCES, progress=say)
    return TrainedScores(found, list(splits), table, swapped, [_mapped(group, say) for group in found])


def _mapped(group: SeedGroup, say: Progress) -> CheckpointAnalysis:
    first = group.entries[0]
    say(f"{first.folder.name}, trained in full: code maps")
    _, model = load_model(first.folder)
    maps = tuple(code_maps(model, first.run.task, points=POINTS, seed=first.run.seed, first=-1))
    return CheckpointAnalysis(first, group, maps=maps)


def sentence(trained: TrainedScores) -> str:
    """Scores on the headline's split: "Trained in full (50,000 steps, one seed): HYLA 0.931 and Softmax 0.773"."""
    order = text.ranked(trained.found)
    scores = text.and_([f"{group.label} {text.number(score.mean)}" for group, score in order])
    run = order[0][0].entries[0].run
    scored = f"scored now, on {_scored(trained)} {run.task.items}"
    about = f"{run.train.steps:,} steps, {text.seeds(order[0][1].n)}; {scored}"
    return f"Trained in full ({about}): {scores} on {text.where(trained.found)}."


def section(out: Page, trained: TrainedScores) -> None:
    """The whole section."""
    first = trained.found[0].entries[0].run
    name = text.metric_name(first.task.metric)
    ours = {about["digest"] for about in shipped.models().values()}
    come = all(digest(entry.run) in ours for group in trained.found for entry in group.entries)
    words = (
        f"{'These models come with polyhead (polyhead list models); their' * come or 'The'} training had "
        f"{first.train.steps:,} steps. "
        f"All below was computed for this report, the scores on {_scored(trained)} {first.task.items} a split."
    )
    out.section("trained", "The same networks, trained in full", "Trained in full")
    out.add(document.paragraphs([words]))
    shown = {"iid": "known"} | {
        split: text.split_words(first.task, split) for split in trained.splits if split != "iid"
    }
    head = ["mechanism", *(f"{name}, {shown[split]}" for split in trained.splits), "n"]
    rows = []
    order = text.ranked(trained.found)
    for group, _ in order:
        cells = [text.with_error(score) if (score := group.score(s)) else "–" for s in trained.splits]
        rows.append(("", [escape(group.label), *cells, text.seeds(len(group.entries))]))
    out.add(document.table(head, rows))
    out.add(document.paragraphs(text.against_floors(order, trained.table, text.headline(trained.found))[:1]))
    if trained.swaps:
        _swaps(out, trained, name)
    _maps(out, trained)


def _scored(trained: TrainedScores) -> str:
    """The number of sequences of a score."""
    results = [entry.result for group in trained.found for entry in group.entries]
    return text.span(int(scores["sequences"]) for result in results if result for scores in result.scores.values())


def _swaps(out: Page, trained: TrainedScores, name: str) -> None:
    out.add("<h3>The code of one sequence in another's forward pass</h3>")
    words = (
        "Two sequences have the same inputs and different functions. In the last layer the code of the query token is "
        f"replaced. If the code alone specified the function, {name} against the donor's function with the donor's "
        "code would be as high as a sequence's own score."
    )
    out.add(document.paragraphs([words, *(_moved(label, seeds, name) for label, seeds in trained.swaps.items())]))
    caption = f"{name} against the donor's function, by the code that the query token got."
    out.add(out.plot(swap_figure(trained, name), caption))
    head = ["code", *(f"{label}: {rule}" for label in trained.swaps for rule in ("own function", "donor's function"))]
    rows = []
    for code in CODES:
        scores = [_over(seeds, code, rule) for seeds in trained.swaps.values() for rule in ("own", "donor")]
        rows.append(("", [escape(WHOSE[code]), *map(text.with_error, scores)]))
    out.add(document.table(head, rows))
    out.add(f'<p class="note">{PAIRS:,} pairs of unseen combinations per model.</p>')


def _moved(label: str, seeds: Sequence[Rows], name: str) -> str:
    """The result of the swaps: the output follows the donor's function, moves towards it, or neither."""
    own, most = _over(seeds, "own", "donor"), _over(seeds, "own", "own")
    donor, other = _over(seeds, "donor", "donor"), _over(seeds, "other", "donor")
    apart = donor.mean - other.mean > 2 * math.hypot(donor.error or 0.0, other.error or 0.0)
    follows = apart and donor.mean > most.mean / 2 > 0  # a network that knows no function follows none
    towards = "moves towards the donor, but does not follow it" if apart else "does not follow the donor"
    numbers = ", ".join(text.number(score.mean, 2) for score in (own, donor, other))
    return (
        f"{label}: the output {'follows the donor' if follows else towards}. {name} against the donor's function is "
        f"{numbers} with the sequence's own code, the donor's and another's. A sequence's own score is "
        f"{text.number(most.mean, 2)}."
    )


def _maps(out: Page, trained: TrainedScores) -> None:
    """The maps of the last layer of each mechanism; the report's switch between methods applies to them."""
    parts = trained.found[0].task.words.parts or text.PARTS
    out.add("<h3>Maps of their codes, last layer</h3>")
    out.add(document.paragraphs([parts.maps.format(count=len(trained.maps[0].maps[0].number))]))
    out.add(legend(trained.maps[0], parts))
    for one in trained.maps:
        out.add(f"<h4>{escape(one.name)}</h4>{layer_maps(out, one, one.maps[-1])}")


def _over(seeds: Sequence[Rows], code: str, rule: str) -> Summary:
    found = [next(row for row in rows if row["code"] == code) for rows in seeds]
    return summary([float(row[rule]) for row in found], float(found[0][f"{rule}_se"]))


def swap_figure(trained: TrainedScores, name: str) -> go.Figure:
    """Bars of the score against the donor's function, by code and mechanism."""
    figure, style = figures.blank(300, y=name), figures.styles(trained.found)
    for label, seeds in trained.swaps.items():
        scores = [_over(seeds, code, "donor") for code in CODES]
        figure.add_bar(
            x=[WHOSE[code] for code in CODES],
            y=[max(score.mean, LOWEST) for score in scores],
            name=label,
            marker={"color": style[label][0]},
            error_y={"type": "data", "array": [score.error or 0.0 for score in scores], "color": style[label][0]},
            customdata=[text.with_error(score) for score in scores],
            hovertemplate="%{x}: %{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="group")
    return figure
