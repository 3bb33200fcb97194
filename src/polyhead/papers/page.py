"""The files of one figure: the page index.html, README.md for GitHub, and the pictures."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.analysis import figures
from polyhead.config.serial import legal
from polyhead.pages.document import figure_as_svg, render
from polyhead.papers.outcome import FigureOutcome
from polyhead.train.store.files import write

RESULTS, PAGE, README = "results.json", "index.html", "README.md"
RUN_COLUMNS = {
    "run": "name",
    "seed": "seed",
    "lr": "lr",
    "weight decay": "weight_decay",
    "warm-up": "warmup",
    "steps": "steps",
    "seconds": "seconds",
    "digest": "digest",
}
RULE = (
    "Each number is a difference over seeds, with the interval of its test. Yes: it is above zero, or above the named "
    "margin, by a one-sided t-test at 0.05 with Holm's correction over this page. No: the same test in the other "
    "direction passes. No difference: its 90 % interval lies within 0.02 of zero. Undecided: none of these, or fewer "
    "than five seeds. A verdict is about what was run here; a small scale is not the paper's."
)
WORDS = {"holds": "yes", "does not hold": "no", "not enough evidence": "undecided", "not a test": "undecided"}
"""Outcome in older results -> verdict."""


def write_all(folder: pathlib.Path, title: str, about: Mapping[str, Any], outcome: FigureOutcome) -> pathlib.Path:
    """Write results.json, the pictures, README.md and the page; return the path of the page.

    `about`: the content of results.json.
    """
    write(folder / RESULTS, results_as_json(about))
    for picture in outcome.pictures:
        figures.save(picture.figure, folder / f"{picture.stem}.svg")
        (folder / f"{picture.stem}.png").unlink(missing_ok=True)  # of an earlier drawing
    write(folder / README, readme(folder, about).encode())
    return write_page(folder / PAGE, title, about, outcome)


def results_as_json(about: Mapping[str, Any]) -> bytes:
    """Return JSON with a line for each run, row or verdict: short, and changes show in a diff."""
    fields = []
    for name, value in about.items():
        is_table = isinstance(value, list | tuple) and any(isinstance(row, dict | list | tuple) for row in value)
        if is_table:
            lines = [json.dumps(legal(row), ensure_ascii=False) for row in value]
            text = "[\n  " + ",\n  ".join(lines) + "\n ]"
        else:
            text = json.dumps(legal(value), ensure_ascii=False)
        fields.append(f"{json.dumps(name)}: {text}")
    return ("{\n " + ",\n ".join(fields) + "\n}\n").encode()


def write_page(path: pathlib.Path, title: str, about: Mapping[str, Any], outcome: FigureOutcome) -> pathlib.Path:
    """Write the page; `about` is the content of results.json."""
    runs = about["runs"]
    facts = {"command": about["command"], "date": about["date"]}
    if runs:
        facts["runs"] = len(runs)
        facts["seeds"] = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
        facts["training, core minutes"] = f"{about['training_seconds'] / 60:.1f}"
    values = {
        "command": about["command"],
        "heading": title,
        "verdicts": outcome.verdicts,
        "rule": RULE,
        "pictures": [figure_as_svg(picture.figure, picture.caption, picture.stem) for picture in outcome.pictures],
        "head": outcome.head,
        "rows": outcome.rows,
        "notes": outcome.notes,
        "facts": facts | about["environment"],
        "failures": [f"{failure['name']}: {failure['error']}" for failure in about["failures"]],
        "run_head": list(RUN_COLUMNS),
        "runs": [[run[key] for key in RUN_COLUMNS.values()] for run in runs],
    }
    page = render("papers/page.html", values, title=f"{title} ({about['scale']})", style="report/report.css")
    return page.save(path, "reproduce")


def readme(folder: pathlib.Path, about: Mapping[str, Any]) -> str:
    """Return the Markdown of results.json: pictures, verdicts with the numbers of their tests, and the table."""
    seeds = sorted({run["seed"] for run in about["runs"]})
    lines = [f"# {about['title']}", ""]
    if about["runs"]:
        lines += [f"Scale {about['scale']}, {len(about['runs'])} runs, seeds {', '.join(map(str, seeds))}."]
    lines += [f"Made by `{about['command']}`; numbers in [results.json](results.json).", ""]
    for stem in about["pictures"]:
        suffix = ".svg" if (folder / f"{stem}.svg").exists() else ".png"
        lines += [f"![{about['title']}]({stem}{suffix})", ""]
    if about["verdicts"]:
        verdict_rows = []
        for verdict in about["verdicts"]:
            word = WORDS.get(verdict["outcome"], verdict["outcome"])
            numbers = []
            for part in verdict.get("parts", ()):
                numbers.append(part_text(part))
            verdict_rows.append([verdict["claim"], f"**{word}**", "<br>".join(numbers)])
        lines += ["## Verdicts", "", *markdown_table(["claim", "verdict", "difference ± standard error"], verdict_rows)]
        lines += ["", "p is one-sided and corrected by Holm over the page, or over its families of claims."]
        lines += ["[How a claim is judged][claims].", ""]
    if about["rows"]:
        lines += ["## Numbers", "", *markdown_table(about["head"], about["rows"]), ""]
    lines += [f"- {note}" for note in about["notes"]]
    if about["verdicts"]:
        depth = len(folder.parts) - folder.parts.index("docs") - 1 if "docs" in folder.parts else 0
        root = "../" * depth if depth else "https://github.com/polyhead/polyhead/blob/main/docs/"
        lines += ["", f"[claims]: {root}explain/claims.md"]
    return "\n".join(lines).rstrip() + "\n"


def part_text(part: Mapping[str, Any]) -> str:
    """Return the name, mean, standard error and corrected p-value of one number of a claim."""
    mean = part["mean"]
    if mean is None:
        return f"{part['name']}: a run without a finite score"
    text = f"{part['name']}: {mean:+.3f}"
    if part["standard_error"] is not None:
        text += f" ± {part['standard_error']:.3f}"
    if part["corrected_p"] is not None:
        text += f", p {part['corrected_p']:.2g}"
    return text.replace(": -", ": −")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
        lines.append("| " + " | ".join(texts) + " |")
    return lines
