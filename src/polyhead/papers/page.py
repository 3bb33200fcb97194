"""The page of one figure: verdicts, pictures, the table with the paper's numbers, and how it was made.

Pictures are embedded as SVG, so the page is one self-contained file.
"""

import base64
import pathlib
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from polyhead.pages.document import bullets, details, escape, facts, table
from polyhead.pages.report.page import Page
from polyhead.papers.claims import NO, YES, Verdict
from polyhead.papers.outcome import FigureOutcome
from polyhead.train.store.folder import write

MARKS = {YES: "●", NO: "✖"}


def write_page(path: pathlib.Path, title: str, about: Mapping[str, Any], outcome: FigureOutcome) -> pathlib.Path:
    """Write the page; `about` is the content of results.json."""
    page = Page()
    if outcome.verdicts:
        page.section("verdicts", "Do the claims hold here?", "Verdicts")
        page.add("".join(_verdict(verdict) for verdict in outcome.verdicts))
        page.add(f'<p class="note">{escape(_HOW)}</p>')
    if outcome.pictures:
        page.section("figures", "Figures" if len(outcome.pictures) > 1 else "Figure")
        page.add("".join(_picture(path.parent / f"{stem}.svg", caption) for stem, caption in outcome.pictures))
    if outcome.rows:
        page.section("table", "Numbers", "Table")
        rows = [("", [escape(cell) for cell in row]) for row in outcome.rows]
        page.add(f'<div style="overflow-x:auto">{table(list(outcome.head), rows)}</div>')
        page.add(f'<p class="note">{_ERRORS}</p>')
    page.add(bullets(outcome.notes, "notes"))
    page.section("made", "How it was made", "Made")
    _made(page, about)
    kicker = f'<p class="kicker">{escape(about["command"])}</p>'
    lead = "".join(f'<p class="lead">{escape(_line(v))}</p>' for v in outcome.verdicts[:1])
    write(path, page.html(f"{title} ({about['scale']})", f"{kicker}<h1>{escape(title)}</h1>{lead}").encode())
    return path


_ERRORS = (
    "± is the standard error over seeds (of a floor, or on a finite test set: over sequences, too), if no note below "
    "says otherwise."
)
_HOW = (
    "Each number above is a difference over seeds with its 95 % interval (Student's t, seed by seed where seeds are "
    "shared; the sampling error of a finite test set is added, in full if it is one set for all seeds; there it "
    "cancels in differences). It holds if it is above zero, or above the margin that is named: one-sided p below 0.05, "
    "corrected by Holm over all numbers of this page, or of their family where the page names families. It does not "
    "hold if the same test in the other direction passes. There is no difference if its 90 % interval lies within 0.02 "
    "of zero. Otherwise there is not enough evidence, and with fewer than five seeds it is not a test. A claim holds "
    "if all of its numbers do. A small scale is not the paper's: a verdict is about what was run here."
)


def _line(verdict: Verdict) -> str:
    return f"{verdict.outcome.capitalize()}: {verdict.claim}."


def _verdict(verdict: Verdict) -> str:
    """The outcome and the claim, and below them the measured numbers."""
    mark = MARKS.get(verdict.outcome, "○")
    parts = verdict.evidence.split("; ")
    if verdict.printed:
        parts += [f"as the paper prints it: {one}" for one in verdict.printed.split("; ")]
    outcome = f'<span aria-hidden="true">{mark}</span> <strong>{escape(verdict.outcome.capitalize())}</strong>'
    return f"<p>{outcome}: {escape(verdict.claim)}</p>{bullets(parts)}"


VECTOR = 200_000
"""A larger SVG, one of thousands of dots, is the PNG in the page: a tenth of its bytes."""


def _picture(path: pathlib.Path, caption: str) -> str:
    pixels = path.with_suffix(".png")  # at the scale "smoke" there is none
    if path.stat().st_size > VECTOR and pixels.is_file():
        data = f"image/png;base64,{base64.b64encode(pixels.read_bytes()).decode()}"
    else:
        data = f"image/svg+xml,{_quoted(path.read_text(encoding='utf-8'))}"
    # On a phone a wide picture scrolls: in full it would be too small to read.
    style = "max-width:max(100%,36rem);background:#fff"
    image = f'<img src="data:{data}" alt="{escape(caption)}" style="{style}">'
    return f'<figure><div style="overflow-x:auto">{image}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _quoted(svg: str) -> str:
    """An SVG for a data URL, as text: a third smaller than base64.  Comments and line breaks are left out."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    # A double quote takes three characters, a single one takes one.
    return urllib.parse.quote(svg if "'" in svg else svg.replace('"', "'"), safe=" !'()*+,/:;=?@[]^`{|}~$<>")


def _made(page: Page, about: Mapping[str, Any]) -> None:
    runs = about["runs"]
    seeds = sorted({run["seed"] for run in runs})
    minutes = about["training_seconds"] / 60
    values = {"command": about["command"], "date": about["date"]}
    if runs:
        values |= {"runs": len(runs), "seeds": ", ".join(map(str, seeds)), "training, core minutes": f"{minutes:.1f}"}
    page.add(facts(values | about["environment"]))
    if about["failures"]:
        page.add("<p>Runs that failed and are left out:</p>")
        page.add(bullets([f"{one['name']}: {one['error']}" for one in about["failures"]]))
    if runs:
        head = ["run", "seed", "lr", "weight decay", "warm-up", "steps", "seconds", "digest"]
        keys = ("name", "seed", "lr", "weight_decay", "warmup", "steps", "seconds", "digest")
        rows = [("", [escape(run[key]) for key in keys]) for run in runs]
        body = f'<div style="overflow-x:auto">{table(head, rows)}</div>'
        page.add(details(f"All {len(runs)} runs", body))
