"""The files of one figure: the page index.html, README.md for GitHub, and the pictures."""

import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Verdict
from polyhead.pages.document import figure_as_svg, render
from polyhead.papers.outcome import FigureOutcome
from polyhead.spec.values import legal
from polyhead.train.messages import escape
from polyhead.train.store.files import write

RESULTS, PAGE, README = "results.json", "index.html", "README.md"
# Title of a column -> field of a run in results.json.
RUN_COLUMNS = {"run": "name", "seed": "seed", "lr": "lr", "weight decay": "weight_decay", "warm-up": "warmup"}
RUN_COLUMNS |= {"steps": "steps", "seconds": "seconds", "digest": "digest"}
VERDICT_COLUMNS = ("claim", "verdict", "number", "difference ± standard error", "interval", "p")
RULE = (
    "Each number is a difference over seeds, with the interval of its test. Yes: it is above zero, or above the named "
    "margin, by a one-sided t-test at 0.05 with Holm's correction over this page or its families of claims. No: the "
    "same test in the other direction passes. No difference: its 90 % interval lies within 0.02 of zero, which is the "
    "yes of a claim of no difference. Undecided: none of these, or fewer than five seeds, or a run without a finite "
    "score. A verdict is about what was run here; a small scale is not the paper's."
)


def write_all(folder: pathlib.Path, about: Mapping[str, Any], outcome: FigureOutcome) -> pathlib.Path:
    """Write results.json, whose content is `about`, the pictures, README.md and the page; return the page's path."""
    write(folder / RESULTS, results_as_json(about))
    for picture in outcome.pictures:
        figures.save(picture.figure, folder / f"{picture.stem}.svg")
        (folder / f"{picture.stem}.png").unlink(missing_ok=True)  # of an earlier drawing
    write(folder / README, readme(folder, about, outcome).encode())
    return write_page(folder / PAGE, about, outcome)


def results_as_json(about: Mapping[str, Any]) -> bytes:
    """Return JSON with a line for each run, row or verdict: short, and changes show in a diff."""
    fields = []
    for name, value in about.items():
        text = json.dumps(legal(value), ensure_ascii=False)
        # A table has a line for each of its rows.
        if isinstance(value, list | tuple) and any(isinstance(row, dict | list | tuple) for row in value):
            lines = [json.dumps(legal(row), ensure_ascii=False) for row in value]
            text = "[\n  " + ",\n  ".join(lines) + "\n ]"
        fields.append(f"{json.dumps(name)}: {text}")
    return ("{\n " + ",\n ".join(fields) + "\n}\n").encode()


def verdict_rows(verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Return a row for each number of each claim; the claim and its verdict stand in the first of its rows."""
    rows: list[tuple[str, ...]] = []
    for verdict in verdicts:
        claim, word = verdict.claim, verdict.outcome
        for part in verdict.parts:
            p = f"{part.p_above:.2g}" if part.is_tested else ""
            rows.append((claim, word, part.name, part.difference, part.interval, p))
            claim = word = ""
    return rows


def write_page(path: pathlib.Path, about: Mapping[str, Any], outcome: FigureOutcome) -> pathlib.Path:
    """Write the page; `about` is the content of results.json."""
    runs = about["runs"]
    facts = {"command": about["command"], "date": about["date"]}
    if runs:
        facts["runs"] = len(runs)
        facts["seeds"] = seeds_text(runs)
        facts["training, core minutes"] = f"{about['training_seconds'] / 60:.1f}"
    values = {
        "command": about["command"],
        "heading": about["title"],
        "verdicts": outcome.verdicts,
        "verdict_columns": VERDICT_COLUMNS,
        "verdict_rows": verdict_rows(outcome.verdicts),
        "rule": RULE,
        "pictures": [figure_as_svg(picture.figure, picture.caption, picture.stem) for picture in outcome.pictures],
        "head": outcome.head,
        "rows": outcome.rows,
        "notes": outcome.notes,
        "facts": facts | about["environment"],
        "failures": [f"{failure['name']}: {failure['error']}" for failure in about["failures"]],
        "run_head": list(RUN_COLUMNS),
        "runs": list(map(itemgetter(*RUN_COLUMNS.values()), runs)),
    }
    title = f"{about['title']} ({about['scale']})"
    return render("papers/page.html", values, title=title, style="report/report.css").save(path, "reproduce")


def seeds_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the seeds of runs as text."""
    return ", ".join(map(str, sorted({run["seed"] for run in runs})))


def readme(folder: pathlib.Path, about: Mapping[str, Any], outcome: FigureOutcome) -> str:
    """Return the page in short as Markdown: pictures, verdicts with the numbers of their tests, and the table."""
    title, command = html.escape(about["title"], quote=False), html.escape(about["command"], quote=False)
    lines = [f"# {title}", ""]
    if about["runs"]:
        lines += [f"Scale {about['scale']}, {len(about['runs'])} runs, seeds {seeds_text(about['runs'])}."]
    lines += [f"Made by `{command}`; numbers in [results.json](results.json).", ""]
    for picture in outcome.pictures:
        lines += [f"![{title}]({picture.stem}.svg)", "", picture.caption, ""]
    if outcome.verdicts:
        rows = []
        for claim, word, *numbers in verdict_rows(outcome.verdicts):
            if word:
                word = f"**{word}**"
            rows.append((claim, word, *numbers))
        lines += ["## Verdicts", "", *markdown_table(VERDICT_COLUMNS, rows), ""]
        sides = "p is one-sided, for a claim of no difference two-sided"
        lines += [f"{sides}, and corrected by Holm over the page, or over its families of claims."]
        lines += ["[How a claim is judged][claims].", ""]
    if outcome.rows:
        lines += ["## Numbers", "", *markdown_table(outcome.head, outcome.rows), ""]
    lines += map("- {}".format, outcome.notes)
    lines += [html.escape(f"- Failed: {one['name']} ({one['error']}).", quote=False) for one in about["failures"]]
    if outcome.verdicts:
        root = "https://github.com/polyhead/polyhead/blob/main/docs/"
        if "docs" in folder.parts:
            root = "../" * (len(folder.parts) - folder.parts.index("docs") - 1)
        lines += ["", f"[claims]: {root}explain/claims.md"]
    return escape("\n".join(lines).rstrip()) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
        lines.append("| " + " | ".join(texts) + " |")
    return lines
