"""A report one can show: run folders in, one HTML file out that opens offline.

Results beside floors and ceiling, learning curves, what the latent code says about the task, and the exact
configuration and command of every run.  Every number is read from the run folders or computed now from their
checkpoints and task.
"""

import errno
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence

import torch

from polyhead import report_figures as figures
from polyhead import report_page as page
from polyhead import report_text as text
from polyhead.config import Task, digest, to_dict
from polyhead.report_codes import Analysed, CodeMap, analyse
from polyhead.report_data import SPLITS, Entry, Group, Summary, baselines, groups, read, unequal
from polyhead.report_page import Page, escape
from polyhead.train.folder import environment

SEQUENCES = 2000  # for the floors and the ceiling, per split
Table = dict[str, dict[str, Summary]]


def write(
    folders: Iterable[str | pathlib.Path],
    path: str | pathlib.Path,
    *,
    title: str | None = None,
    progress: bool = True,
) -> pathlib.Path:
    """Write the report on run `folders` to `path` and return that path.

    >>> write(["runs/softmax-0", "runs/hyla-0"], "runs/report.html")

    `title` stands above the headline.  Unfinished runs show their curves only, and a note says so; so does one
    whose checkpoint cannot be read.  ValueError: no folders, a folder that is no run, a damaged file, runs of
    different tasks, or a path that cannot be written.
    """

    def say(line: str) -> None:
        if progress:
            print(f"report: {line}", file=sys.stderr, flush=True)

    path = pathlib.Path(path)
    _check_place(path)
    say("reading runs")
    entries = read(folders)
    found = groups(entries)
    splits = [s for s in SPLITS if any(group.score(s) for group in found)] or ["iid", "compositional"]
    try:
        table = baselines(found, splits, sequences=SEQUENCES, progress=say)
        notes = []
    except ValueError as error:  # the ceiling of a long family cannot be enumerated
        table, notes = {}, [f"No floors and ceiling: {error}"]
    analysed = analyse(found, say)
    notes += [note for entry in entries for note in entry.notes] + [one.note for one in analysed if one.note]
    content = _page(found, splits, table, analysed, notes, title)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(f"report: {path} cannot be written ({error.strerror})") from None
    say(f"{path} ({len(content) / 1e6:.1f} MB)")
    return path


def _check_place(path: pathlib.Path) -> None:
    """Notice a place that cannot be written before the work, not after it.  Raises ValueError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ValueError(f"report: {path} cannot be written ({error.strerror})") from None


def _page(
    found: Sequence[Group],
    splits: Sequence[str],
    table: Table,
    analysed: Sequence[Analysed],
    notes: Sequence[str],
    title: str | None,
) -> str:
    out = Page()
    metric = found[0].task.metric
    headline = text.title(found)
    if notes:
        out.add(page.bullets(notes, "notes"))
    _results(out, found, splits, table, metric)
    _curves(out, found, splits, table, metric)
    if any(one.rows for one in analysed):
        _probes(out, found, analysed)
    if any(one.maps for one in analysed):
        _maps(out, analysed)
    _runs(out, [entry for group in found for entry in group.entries])
    out.section("terms", "What the words mean", "Terms")
    terms = text.definitions(_task_name(found[0].task), metric)
    out.add("<dl>" + "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in terms) + "</dl>")
    lines = text.verdict(found, table)
    kicker = f'<p class="kicker">{escape(title or "polyhead report")}</p>'
    head = f"{kicker}<h1>{escape(headline)}</h1>{page.paragraphs(lines[:1], lead=True)}{page.bullets(lines[1:])}"
    return out.html(f"{title or 'polyhead'}: {headline}", head + f'<p class="meta">{escape(_about(found))}</p>')


def _task_name(task: Task) -> str:
    return task.name.replace("_", " ")


def _about(found: Sequence[Group]) -> str:
    """The task and the runs, in a line."""
    values = {k: v for k, v in to_dict(found[0].task).items() if k not in ("kind", "split_seed", "inputs")}
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    runs = [entry for group in found for entry in group.entries]
    done = sum(entry.result is not None for entry in runs)
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}" + (f", {done} finished" if done < len(runs) else "")
    return f"Task: {_task_name(found[0].task)} ({settings}). {count}."


def _swatch(style: tuple[str, str]) -> str:
    glyph = dict(zip(figures.MARKERS, "●■◆▲✚▼★⬢✖", strict=True))[style[1]]
    return page.swatch(style[0], glyph)


# ------------------------------------------------------------------------------------------------------------- results
def _results(out: Page, found: Sequence[Group], splits: Sequence[str], table: Table, metric: str) -> None:
    out.section("results", "Results")
    if text.ranked(found):
        caption = (
            f"{text.metric_name(metric)} of each mechanism and of the floors, with standard errors. Dashed line: "
            "Gaussian process, which composes nothing. Dotted line: exact ceiling."
            if "gaussian_process" in table
            else f"{text.metric_name(metric)} of each mechanism, with standard errors."
        )
        out.add(out.plot(figures.results(found, table, metric), caption))
    style = figures.styles(found)
    name = text.metric_name(metric)
    head = ["mechanism", *(f"{split} {name}" for split in splits), "n", "parameters", "training, s"]
    rows: list[tuple[str, list[str]]] = []
    order = [group for group, _ in text.ranked(found)]
    order += [group for group in found if group.finished and group not in order]
    for group in order:
        rows.append(("", _group_row(group, splits, style[group.label])))
    floors = sorted(table, key=lambda n: -table[n].get("compositional", next(iter(table[n].values()))).mean)
    for i, floor in enumerate(floors):
        label = (
            f'{escape(text.floor_name(floor))}<span class="small">{escape(text.FLOORS.get(floor, ("", ""))[1])}</span>'
        )
        cells = [text.with_error(table[floor][s]) if s in table[floor] else "" for s in splits]
        rows.append(("floor first" if i == 0 else "floor", [label, *cells, f"{SEQUENCES:,} sequences", "", ""]))
    out.add(page.table(head, rows))
    out.add(f'<p class="note">{escape(_table_note(order, bool(table)))}</p>')
    if different := unequal(found):
        out.add("<p>The mechanisms were not trained alike; settings that differ beside the heads:</p>")
        out.add(page.bullets(different))


def _group_row(group: Group, splits: Sequence[str], style: tuple[str, str]) -> list[str]:
    cells = [text.with_error(score) if (score := group.score(split)) else "–" for split in splits]
    parameters, seconds = group.mean("parameters"), group.mean("seconds")
    size = "–" if parameters is None else f"{parameters:,.0f}"
    return [
        _swatch(style) + escape(group.label),
        *cells,
        text.seeds(len(group.finished)),
        size,
        "–" if seconds is None else f"{seconds:,.0f}",
    ]


def _table_note(order: Sequence[Group], floors: bool) -> str:
    single = [group.label for group in order if len(group.finished) == 1]
    lines = []
    if single and len(single) == len(order):
        lines.append("± is over test sequences: with one seed each, nothing is known about other seeds.")
    elif single:
        lines.append(
            f"± is the standard error over seeds; for {', '.join(single)}, with one seed, over test sequences."
        )
    elif order:
        lines.append("± is the standard error over seeds; parameters and training time are means over seeds.")
    if floors:
        lines.append("Floors and ceiling were computed for this report; their ± is over test sequences.")
    return " ".join(lines)


# -------------------------------------------------------------------------------------------------------------- curves
def _curves(out: Page, found: Sequence[Group], splits: Sequence[str], table: Table, metric: str) -> None:
    entries = [entry for group in found for entry in group.entries]
    if not any(entry.rows for entry in entries):
        return
    out.section("curves", "Learning curves")
    parts = [out.plot(figures.losses(found), "Loss on training batches.")]
    for split in splits:
        if any(entry.curve("eval", metric, split)[0] for entry in entries):
            caption = (
                f"{text.metric_name(metric)} on {split} sequences; horizontal lines are the floors and the ceiling."
            )
            parts.append(out.plot(figures.scores(found, split, table, metric), caption))
    out.add(f'<div class="row">{"".join(parts)}</div>')
    out.add('<p class="note">One line per seed; a faint line is a run that is not finished.</p>')


# -------------------------------------------------------------------------------------------------------------- probes
def _probes(out: Page, found: Sequence[Group], analysed: Sequence[Analysed]) -> None:
    out.section("probes", "Can the terms be read off the latent code?", "Probes")
    count = next(row["n"] for one in analysed for row in one.rows)
    out.add(
        page.paragraphs(
            [
                "A logistic regression reads each term of the function off the code of the query attending to itself, "
                f"one number per head. It is fitted on {count:,} sequences of training tasks and scored on {count:,} "
                "of unseen combinations. What a code says depends on the query it is asked about, so the terms are "
                "easier to find when all sequences share one query (mean over several such probes) than when each has "
                "its own. In layer 1 a code that is not normalised over keys depends on the query token alone: with "
                "one query for all it is one code, from which nothing can be read."
            ]
        )
    )
    kinds = {"fixed": "one query for all sequences", "varies": "every sequence its own query"}
    plots = [
        out.plot(
            figures.probes(analysed, found, kind), f"{words.capitalize()}: macro F1 by layer and term. Dashed: chance."
        )
        for kind, words in kinds.items()
    ]
    out.add(f'<div class="row">{"".join(plots)}</div>')
    rows = []
    for kind, words in kinds.items():
        cells = figures.probe_cells(analysed, kind)
        labels, places = list(dict.fromkeys(k[0] for k in cells)), list(dict.fromkeys(k[1] for k in cells))
        for place in places:
            mine = [cells.get((label, place)) for label in labels]
            chance = [cell[1] for cell in mine if cell]
            each = [text.with_error(cell[0]) if cell else "–" for cell in mine]
            name = f'layer {place[0] + 1}, {escape(place[1])}<span class="small">{words}</span>'
            rows.append(("", [name, *each, text.number(sum(chance) / len(chance))]))
    out.add(page.table(["macro F1", *labels, "chance"], rows))
    out.add('<p class="note">± is the standard error over seeds, where there are several.</p>')


# ---------------------------------------------------------------------------------------------------------------- maps
def _maps(out: Page, analysed: Sequence[Analysed]) -> None:
    out.section("maps", "Maps of the latent code", "Code maps")
    shown = [one for one in analysed if one.maps]
    count = len(shown[0].maps[0].number)
    out.add(
        page.paragraphs(
            [
                f"Each point is the code of one query attending to itself: {count} sequences of unseen combinations, "
                "all with the same context inputs. The same map is coloured several ways; clusters that follow the "
                "function or a term rather than the target mean that the code says what to compute."
            ]
        )
    )
    radios = [("tsne", "t-SNE", " checked"), ("pca", "PCA", "")]
    boxes = "".join(f'<label><input type="radio" name="method" value="{v}"{c}> {n}</label>' for v, n, c in radios)
    out.add(f'<div class="switch" role="radiogroup" aria-label="Kind of map">{boxes}</div>')
    out.add(_legend(shown[0]))
    seen: set[str] = set()
    for one in shown:
        body = "".join(_layer(out, one, layer) for layer in one.maps)
        heading = f"{one.group.label}, seed {one.entry.run.seed}"
        first = one.group.label not in seen
        seen.add(one.group.label)
        out.add(f"<h3>{escape(heading)}</h3>{body}" if first else page.details(heading, body))


def _layer(out: Page, one: Analysed, layer: CodeMap) -> str:
    parts = [name for name in layer.labels if name != "function"]
    by = ["target", *(["function"] if "function" in layer.labels else []), *parts]
    plots, maps = [], {method: figures.coordinates(layer, method) for method in layer.points}
    for name in by:
        names = _class_names(one.entry.run.task, layer, name)
        plots.append(out.plot(figures.code_map(layer, name, names), f"by {name}", maps=maps))
    return f'<h4>Layer {layer.layer + 1}</h4><div class="maps">{"".join(plots)}</div>'


def _class_names(task: Task, layer: CodeMap, colour_by: str) -> dict[int, str]:
    """What a reader sees on a point: "¬x₁x₂x₃¬x₄", and such terms joined by "or" for a function."""
    if colour_by == "target":
        return {}
    parts = [name for name in layer.labels if name != "function"]
    if colour_by != "function":
        return {int(i): term(task, int(i)) for i in set(layer.labels[colour_by].tolist())}
    rows = zip(layer.labels["function"].tolist(), *(layer.labels[name].tolist() for name in parts), strict=True)
    return {row[0]: " or ".join(term(task, i) for i in row[1:]) for row in rows}


def term(task: Task, index: int) -> str:
    """A term of fuzzy logic by its literals, first variable first; of other tasks its number."""
    variables = getattr(task, "variables", None)
    if variables is None:
        return str(index)
    bits = [(index >> (variables - 1 - v)) & 1 for v in range(variables)]
    return "".join(("" if bit else "¬") + "x" + chr(0x2081 + v) for v, bit in enumerate(bits))


def _legend(one: Analysed) -> str:
    """The marks of the terms, shared by all maps."""
    labels = [values for name, values in one.maps[0].labels.items() if name != "function"]
    found = sorted({int(i) for values in labels for i in values})
    items = []
    for i in found:
        colour, _, glyph = figures.category(i)
        items.append(f"<span>{page.swatch(colour, glyph)}{escape(term(one.entry.run.task, i))}</span>")
    return f'<p class="legend"><span>Terms:</span>{"".join(items)}</p>'


# ---------------------------------------------------------------------------------------------------------------- runs
def _runs(out: Page, entries: Sequence[Entry]) -> None:
    out.section("runs", "Every run, exactly", "Runs")
    for entry in entries:
        run, result = entry.run, entry.result
        state = f"{entry.step:,} steps" if result else f"unfinished, {entry.step:,} of {run.train.steps:,} steps"
        command = result.command if result else f"python -m polyhead.train {entry.folder / 'config.json'}"
        body = f"<h4>Command</h4><pre><code>{escape(command)}</code></pre>"
        about: dict[str, object] = {"folder": entry.folder, "digest": digest(run), "seed": run.seed}
        body += "<h4>Environment</h4>" + page.facts(about | dict(result.environment if result else {}))
        config = json.dumps(to_dict(run), indent=2, ensure_ascii=False)
        body += f"<h4>Configuration</h4><pre><code>{escape(config)}</code></pre>"
        out.add(page.details(f"{entry.folder.name}: seed {run.seed}, {state}", body))
    here = {
        k: v for k, v in environment(torch.device("cpu")).items() if k in ("python", "torch", "polyhead", "cpu", "date")
    }
    out.add(page.details("This report", page.facts(here)))
