"""A report on run folders: one HTML file that opens offline, and its figures as files.

It has results with floors and ceiling, learning curves, the information in the latent code, the effect of each head,
and the configuration and command of every run.  Every number is read from the run folders or computed from their
checkpoints and task.
"""

import json
import pathlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from polyhead.analysis.canvas import blank
from polyhead.config import Task, digest, to_dict
from polyhead.pages import document
from polyhead.pages.document import escape, paragraphs
from polyhead.pages.report import figures, headline as text, runs
from polyhead.pages.report.attention import CheckpointExamples, looks
from polyhead.pages.report.attention_section import section as look_section
from polyhead.pages.report.codes import CheckpointAnalysis, analyse
from polyhead.pages.report.export import FORMATS, draw
from polyhead.pages.report.glossary import definitions
from polyhead.pages.report.page import Page, swatch
from polyhead.pages.report.runs import Entry, Progress, SeedGroup, Summary, Table
from polyhead.pages.report.sections import sections
from polyhead.pages.report.trained import TrainedScores, measure, section as trained_section, sentence
from polyhead.spec.shapes import one_of
from polyhead.train.progress import wanted
from polyhead.train.store.files import check_folder, check_place
from polyhead.train.store.folder import environment

SEQUENCES = 2000  # per split, for floors and ceiling


@dataclass(frozen=True)
class Findings:
    """The contents of a report before drawing."""

    found: list[SeedGroup]
    splits: list[str]
    table: Table
    analysed: list[CheckpointAnalysis]
    looked: list[CheckpointExamples]
    notes: list[str]


def write(
    folders: Iterable[str | pathlib.Path],
    path: str | pathlib.Path,
    *,
    title: str | None = None,
    static: str | pathlib.Path | None = None,
    beside: Iterable[str | pathlib.Path] = (),
    trained: Iterable[str | pathlib.Path] = (),
    progress: bool = True,
) -> pathlib.Path:
    """Write the report on run `folders` to `path` and return that path.

    >>> write(["runs/softmax-0", "runs/hyla-0"], "runs/report.html")

    `title`: shown above the headline.  `beside`: runs of another task, with a separate table of results.  `trained`:
    the same networks after longer training (folders, or names from `polyhead list models`): they are scored again, and
    their codes are swapped and mapped.  `static`: a folder for all figures as PNG and SVG.  Unfinished runs, and runs
    with an unreadable checkpoint, appear only with their curves and a note.  Raises ValueError for no folders, a folder
    that is not a run, a damaged file, runs of different tasks, or a path that cannot be written.
    """
    path = pathlib.Path(path)
    check_place("report", path)
    if static is not None:
        _check_figures(pathlib.Path(static))
    say = _speaker(progress)
    findings = _gather(folders, say)
    others = _measure(beside, say) if (beside := list(beside)) else None
    full = measure(trained, findings.splits, say) if (trained := list(trained)) else None
    content = _page(findings, title, others, full)
    document.save("report", path, content)
    say(f"{path} ({len(content) / 1e6:.1f} MB)")
    if static is not None:
        _draw(findings, pathlib.Path(static), say)
    return path


def export(
    folders: Iterable[str | pathlib.Path],
    directory: str | pathlib.Path,
    *,
    formats: Sequence[str] = FORMATS,
    progress: bool = True,
) -> list[pathlib.Path]:
    """Write every figure of the report on `folders` into `directory`, as PNG and SVG (or PDF), without the page.

    >>> export(["runs/softmax-0", "runs/hyla-0"], "figures")

    Returns the files.  ValueError as in `write`.
    """
    for kind in formats:
        one_of("export", "format", kind, (*FORMATS, "pdf"))
    _check_figures(pathlib.Path(directory))
    say = _speaker(progress)
    return _draw(_gather(folders, say), pathlib.Path(directory), say, formats)


def _speaker(progress: bool) -> Progress:
    def say(line: str) -> None:
        if wanted(progress):
            print(f"report: {line}", file=sys.stderr, flush=True)

    return say


def title(folders: Iterable[str | pathlib.Path]) -> str:
    """The headline of the report on run `folders`: "HYLA and Softmax are level on unseen combinations (...)"."""
    return text.title(runs.groups(runs.read(folders)))


def results_table(folders: Iterable[str | pathlib.Path]) -> tuple[list[str], list[list[str]]]:
    """The head and rows of the table of results: mechanisms, best first, then floors, as mean ± standard error."""
    findings = _measure(folders, _speaker(False))
    found, splits, table = findings.found, findings.splits, findings.table
    rows = [[g.label, *(_cell(g, split) for split in splits)] for g in _in_order(found)]
    floors = _floors_in_order(found, table)
    rows += [[text.floor(found[0].task, n).label, *(text.with_error(table[n][s]) for s in splits)] for n in floors]
    return ["", *splits], rows


def _gather(folders: Iterable[str | pathlib.Path], say: Progress) -> Findings:
    """Read the runs, and compute floors, probes and maps."""
    findings = _measure(folders, say)
    analysed, looked = analyse(findings.found, say), looks(findings.found, say)
    notes = [*findings.notes, *(one.note for one in (*analysed, *looked) if one.note)]
    return replace(findings, analysed=analysed, looked=looked, notes=list(dict.fromkeys(notes)))


def _measure(folders: Iterable[str | pathlib.Path], say: Progress) -> Findings:
    """The runs with floors and ceiling, without analyses of their codes."""
    say("reading runs")
    entries = runs.read(folders)
    found = runs.groups(entries)
    tests = [s for s in runs.in_order(found[0].task.splits, runs.SPLITS) if s not in ("train", "validation")]
    splits = [s for s in tests if any(group.score(s) for group in found)]
    splits = splits or [s for s in (runs.headline(found),) if any(group.score(s) for group in found)]  # "validation"
    splits = splits or tests[:2]  # of runs that are not finished
    try:
        table = runs.baselines(found, splits, sequences=SEQUENCES, progress=say)
        notes = []
    except ValueError as error:  # the ceiling of a large family cannot be enumerated
        table, notes = {}, [f"No floors and ceiling: {error}"]
    notes += [note for entry in entries for note in entry.notes]
    return Findings(found, splits, table, [], [], list(dict.fromkeys(notes)))


def _draw(
    findings: Findings, directory: pathlib.Path, say: Progress, formats: Sequence[str] = FORMATS
) -> list[pathlib.Path]:
    say(f"figures in {directory}")
    done = findings.analysed, findings.looked
    return draw(directory, findings.found, findings.splits, findings.table, *done, formats=formats)


def _check_figures(folder: pathlib.Path) -> None:
    """Raise a ValueError before the work if figures cannot be drawn, or the folder cannot be written."""
    blank(1.0, 1.0)
    check_folder("report", folder)


def _page(findings: Findings, title: str | None, others: Findings | None, full: TrainedScores | None) -> str:
    found = findings.found
    out = Page()
    headline = text.title(found)
    picture = _together(out, findings)
    first, further = text.opening(found, findings.table, sentence(full) if full else "")
    out.add(document.bullets(findings.notes, "notes"))
    out.section("results", "Results")
    out.add(document.bullets(further))
    _table(out, findings)
    if full is not None:
        trained_section(out, full)
    if others is not None:
        _beside(out, others)
    if any(entry.rows for group in found for entry in group.entries):
        out.section("curves", "Learning curves")
        _plots(out, findings)
    look_section(out, findings.looked)
    sections(out, found, findings.analysed)
    _runs(out, [entry for group in found for entry in group.entries])
    out.section("terms", "What the words mean", "Terms")
    terms = definitions(found[0].task)
    out.add("<dl>" + "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in terms) + "</dl>")
    head = f"{paragraphs([title or 'polyhead report'], 'kicker')}<h1>{escape(headline)}</h1>{picture}"
    head += paragraphs([" ".join(first)], "lead") + paragraphs([_about(found)], "meta")
    return out.html(f"{title or 'polyhead'}: {headline}", head)


def _task_name(task: Task) -> str:
    return task.name.replace("_", " ")


def _title(task: Task) -> str:
    game = getattr(task, "game", None)
    return _task_name(task).capitalize() + (f": {game}" if game else "")


def _about(found: Sequence[SeedGroup]) -> str:
    """The task and the runs as one line."""
    own = to_dict(found[0].task)
    values = {k: v for k, v in own.items() if k not in ("kind", "split_seed", "inputs", "folder") and v is not None}
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    runs = [entry for group in found for entry in group.entries]
    done = sum(entry.result is not None for entry in runs)
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}" + (f", {done} finished" if done < len(runs) else "")
    return f"Task: {_task_name(found[0].task)}{f' ({settings})' if settings else ''}. {count}."


# ------------------------------------------------------------------------------------------------------------- results
def _together(out: Page, findings: Findings) -> str:
    """Fresh data and the headline's split in one figure, if both were scored during training; else ""."""
    found, table = findings.found, findings.table
    if not text.courses(found):
        return ""
    name, unseen = text.metric_name(found[0].task.metric).capitalize(), text.where(found)
    caption = f"{name} during training: dotted on {text.iid_words(found)}, solid on {unseen}."
    if table:
        ceiling = ", and the ceiling," if "ceiling" in table else ""
        caption += f" Grey: baselines without a network{ceiling} on {unseen}."
    return out.plot(figures.together(found, table), caption)


def _beside(out: Page, others: Findings) -> None:
    """The results of runs of another task."""
    found = others.found
    out.section("beside", _title(found[0].task))
    out.add(paragraphs([text.title(found) + ".", *text.verdict(found, others.table)]))
    out.add(document.bullets(others.notes, "notes"))
    _table(out, others)
    _plots(out, others)


def _table(out: Page, findings: Findings) -> None:
    found, splits, table = findings.found, findings.splits, findings.table
    task, order = found[0].task, _in_order(found)
    name = text.metric_name(task.metric)
    if text.ranked(found):
        dashed = [text.floor(task, n).label for n, line in figures.dashes(task, table).items() if line != "dot"]
        caption = f"{name.capitalize()} of each mechanism{' and of the floors' * bool(dashed)}, with standard errors."
        if dashed:
            composes = ". None of them composes anything new. Dotted line: exact ceiling" if "ceiling" in table else ""
            caption += f" Dashed line{'s' * (len(dashed) > 1)}: {', '.join(dashed)}{composes}."
        out.add(out.plot(figures.results(found, table), caption))
    style = figures.styles(found)
    head = ["mechanism", *(f"{text.split_name(split)} {name}" for split in splits), "n", "parameters", "training, s"]
    rows = [("", _group_row(group, splits, style[group.label])) for group in order]
    for i, floor in enumerate(_floors_in_order(found, table)):
        rows.append(("floor" if i else "floor first", _floor_row(task, floor, table[floor], splits)))
    out.add(document.table(head, rows))
    measured = any(row.error is not None for by_split in table.values() for row in by_split.values())
    out.add(paragraphs([_table_note(order, task.items, measured)], "note"))
    if different := runs.unequal(found):
        out.add("<p>The mechanisms were trained with different settings. Besides the heads, these differ:</p>")
        out.add(document.bullets(different))


def _in_order(found: Sequence[SeedGroup]) -> list[SeedGroup]:
    """Finished groups, best first."""
    order = [group for group, _ in text.ranked(found)]
    return order + [group for group in found if group.finished and group not in order]


def _floors_in_order(found: Sequence[SeedGroup], table: Table) -> list[str]:
    split, gain = runs.headline(found), found[0].task.gain
    return sorted(table, key=lambda n: -gain(table[n].get(split, next(iter(table[n].values()))).mean))


def _cell(group: SeedGroup, split: str) -> str:
    score = group.score(split)
    return text.with_error(score) if score else "–"


def _group_row(group: SeedGroup, splits: Sequence[str], style: figures.Style) -> list[str]:
    numbers = [group.mean("parameters"), group.mean("seconds")]
    return [
        swatch(style[0], figures.GLYPHS[style[1]]) + escape(group.label),
        *(_cell(group, split) for split in splits),
        text.seeds(len(group.finished)),
        *("–" if number is None else f"{number:,.0f}" for number in numbers),
    ]


def _floor_row(task: Task, name: str, scores: dict[str, Summary], splits: Sequence[str]) -> list[str]:
    words = text.floor(task, name)
    exact = all(score.error is None for score in scores.values())
    count = "exact" if exact else f"{text.span(score.count for score in scores.values())} {task.items}"
    cells = [text.with_error(scores[split]) if split in scores else "" for split in splits]
    return [f'{escape(words.label)}<span class="small">{escape(words.does)}</span>', *cells, count, "", ""]


def _table_note(order: Sequence[SeedGroup], items: str, floors: bool) -> str:
    single = [group.label for group in order if len(group.finished) == 1]
    lines = []
    if single and len(single) == len(order):
        lines.append(f"± is over test {items}: with one seed each, other seeds may differ.")
    elif single:
        lines.append(f"± is the standard error over seeds; for {', '.join(single)}, with one seed, over test {items}.")
    elif order:
        lines.append("± is the standard error over seeds; parameters and training time are means over seeds.")
    if any(" + " in group.label for group in order):
        lines.append("A number after a mechanism counts its heads in a layer.")
    if floors:
        lines.append(f"Floors and ceiling were computed for this report; their ± is over test {items}.")
    return " ".join(lines)


# -------------------------------------------------------------------------------------------------------------- curves
def _plots(out: Page, findings: Findings) -> None:
    """Loss and scores over steps."""
    found, table = findings.found, findings.table
    task, entries = found[0].task, [entry for group in found for entry in group.entries]
    floors = "the floors and the ceiling" if "ceiling" in table else ", ".join(text.floor(task, n).label for n in table)
    lines = f"; horizontal lines: {floors}" if table else ""
    name = text.metric_name(task.metric).capitalize()
    parts = [out.plot(figures.losses(found), "Loss on training batches.")]
    for split in findings.splits:
        if any(entry.curve("eval", task.metric, split)[0] for entry in entries):
            caption = f"{name} on {text.sample(task, split)}{lines}."
            parts.append(out.plot(figures.scores(found, split, table), caption))
    out.add(f'<div class="row">{"".join(parts)}</div>')
    out.add(paragraphs(["One line per seed; a faint line is a run that is not finished."], "note"))


# ---------------------------------------------------------------------------------------------------------------- runs
def _runs(out: Page, entries: Sequence[Entry]) -> None:
    out.section("runs", "Every run, exactly", "Runs")
    for entry in entries:
        run, result = entry.run, entry.result
        part = f"{'failed' if entry.failure else 'unfinished'}, {entry.step:,} of {run.train.steps:,} steps"
        state = f"{entry.step:,} steps" if result else part
        config = shlex.quote(str(entry.folder / "config.json"))
        command = result.command if result else f"python -m polyhead.train {config}"
        body = f"<h4>Command</h4><pre><code>{escape(command)}</code></pre>"
        about: dict[str, object] = {"folder": entry.folder, "digest": digest(run), "seed": run.seed}
        body += "<h4>Environment</h4>" + document.facts(about | dict(result.environment if result else {}))
        settings = json.dumps(to_dict(run), indent=2, ensure_ascii=False)
        body += f"<h4>Configuration</h4><pre><code>{escape(settings)}</code></pre>"
        out.add(document.details(f"{entry.folder.name}: seed {run.seed}, {state}", body))
    here = environment(torch.device("cpu"))
    names = [name for name in here if name in ("python", "torch", "polyhead", "cpu", "date")]
    out.add(document.details("This report", document.facts({name: here[name] for name in names})))
