"""A report on run folders: one HTML page that opens offline, and its figures as files.

It has results with baselines, verdicts, learning curves, the information in the latent code, the effect of each head,
and the configuration and command of every run.  Every number is read from the run folders or computed from their
checkpoints and task.
"""

import json
import pathlib
import shlex
from collections.abc import Iterable

from polyhead.analysis import canvas
from polyhead.config import digest, to_dict
from polyhead.pages.document import HtmlPage, render
from polyhead.pages.report import results as parts, runs
from polyhead.pages.report.attention import attention_section
from polyhead.pages.report.codes import analyse, code_sections
from polyhead.pages.report.results import Results, curves_section, results_section
from polyhead.pages.report.runs import Entry
from polyhead.pages.report.section import Draft, Section
from polyhead.spec.values import flat
from polyhead.train.store.files import check_folder, check_place

SEQUENCES = 2000  # per split, for baselines
Folders = Iterable[str | pathlib.Path]


def page(folders: Folders, *, title: str | None = None, progress: bool = True) -> HtmlPage:
    """The report on run `folders`, which a notebook shows by itself; options as in `write`."""
    return _build(folders, title, Draft(progress))


def write(
    folders: Folders,
    path: str | pathlib.Path,
    *,
    title: str | None = None,
    static: str | pathlib.Path | None = None,
    progress: bool = True,
) -> pathlib.Path:
    """Write the report on run `folders` to `path` and return that path.

    Unfinished runs, and runs with an unreadable checkpoint, appear only with their curves and a note.

    >>> write(["runs/softmax-0", "runs/hyla-0"], "runs/report.html")

    Args:
        folders: Those of one task; also names from `polyhead list models`.
        title: Shown above the headline.
        static: A folder for all figures as PNG and SVG.

    Raises:
        ValueError: For no folders, one that is not a run, a damaged file, several tasks, or a path not to be written.
    """
    path = pathlib.Path(path)
    check_place("report", path)
    if static is not None:
        check_folder("report", pathlib.Path(static))
    draft = Draft(progress)
    content = _build(folders, title, draft)
    content.save(path, "report")
    draft.tell(f"{path} ({len(content.text) / 1e6:.1f} MB)")
    if static is not None:
        for name, figure in draft.figures.items():
            canvas.save(figure, pathlib.Path(static, f"{name}.png"), pathlib.Path(static, f"{name}.svg"))
    return path


# ------------------------------------------------------------------------------------------------------------ contents
def _results(folders: Folders) -> Results:
    """The runs with their baselines."""
    entries = runs.read(folders)
    groups = runs.groups(entries)
    splits = [split for split in runs.scored_splits(groups) if split not in ("train", "validation")]
    headline = runs.headline_split(groups)
    if headline not in splits:  # scored on validation data alone, or not yet
        splits.append(headline)
    notes: list[str] = []
    for entry in entries:
        notes += entry.notes
    try:
        baselines = runs.baselines(groups, splits, SEQUENCES)
    except ValueError as error:  # the ceiling of a large family cannot be enumerated
        baselines = {}
        notes.append(f"No baselines: {error}")
    return Results(groups, splits, baselines, notes)


def _build(folders: Folders, title: str | None, draft: Draft) -> HtmlPage:
    """The page; `draft` gets its figures."""
    canvas.blank(1.0, 1.0)  # before the work: is matplotlib installed?
    draft.tell("runs and baselines")
    results = _results(folders)
    draft.notes += results.notes
    # In the order of the page; a section that the runs do not allow is None.
    sections: list[Section | None] = [results_section(results, draft), curves_section(results, draft)]
    sections.append(attention_section(results.groups, draft))
    sections += code_sections(analyse(results.groups, draft), draft)

    headline = parts.title(results)
    kicker = title or "polyhead report"
    details: list[dict[str, object]] = []
    for group in results.groups:
        details += map(_run_details, group.entries)
    values = {
        "kicker": kicker,
        "headline": headline,
        "settings": _settings(results),
        "notes": list(dict.fromkeys(draft.notes)),
        "sections": list(filter(None, sections)),
        "runs": details,
        "terms": _terms(results),
    }
    return render("pages/report/report.html", values, title=f"{kicker}: {headline}", style="report/report.css")


def _settings(results: Results) -> dict[str, object]:
    """The settings of the task; runs that differ in their division list the seeds of all divisions."""
    settings = flat(to_dict(results.task))
    seeds: set[int] = set()
    for group in results.groups:
        for entry in group.entries:
            seeds.add(runs.seeds_of(entry.run)[1] or 0)
    if len(seeds) > 1:
        settings["split_seed"] = " and ".join(map(str, sorted(seeds)))
    return settings


def _terms(results: Results) -> list[tuple[str, str]]:
    """Words and their meanings: those of the task, then general ones."""
    words = results.task.words
    terms = []
    if words.metric is not None:
        terms.append(words.metric)
    for name in results.baselines:
        if name in words.baselines:
            terms.append((words.baselines[name].label, words.baselines[name].does))
    terms.append(("Latent code", "The attention scores of a query-key pair after normalisation: one number per head."))
    return terms


def _run_details(entry: Entry) -> dict[str, object]:
    """What the page tells of one run: its command, environment and configuration."""
    run, result = entry.run, entry.result
    facts: dict[str, object] = {"folder": entry.folder, "digest": digest(run), "seed": run.seed}
    if result is None:
        state, command = "unfinished", f"polyhead resume {shlex.quote(str(entry.folder))}"
    else:
        state, command = "finished", result.command
        facts.update(result.environment)
    return {
        "summary": f"{entry.folder.name}: seed {run.seed}, {state}",
        "command": command,
        "facts": facts,
        "configuration": json.dumps(to_dict(run), indent=2, ensure_ascii=False),
    }
