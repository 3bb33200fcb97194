"""The beginning of a report: its figure and three sentences."""

import html
import json
import pathlib
import re

import pytest

import polyhead as ph
from polyhead.config import save
from polyhead.pages.report import codes as report_codes, headline, writer as report
from polyhead.pages.report.runs import groups, read
from polyhead.tasks import FuzzyLogic

TASK = FuzzyLogic(variables=3, terms=2, length=8)
COURSES = {"softmax": ((0.5, 0.6), (0.8, 0.55)), "hyla": ((0.3, 0.35), (0.25, 0.45))}
"""Known and unseen, each at half of the training and at its end."""


def fabricate(root: pathlib.Path, name: str, heads: ph.Softmax | ph.Hyla) -> pathlib.Path:
    """A finished run, without its parameters."""
    model = ph.TransformerConfig(*TASK.ends, dim=16, layers=2, heads=(heads,), max_length=8)
    run = ph.Run(name=name, task=TASK, model=model, train=ph.Train(steps=100))
    folder = root / name
    folder.mkdir(parents=True)
    save(run, folder / "config.json")
    known, unseen = COURSES[name]
    scores = {10: (0.0, 0.0), 50: (known[0], unseen[0]), 100: (known[1], unseen[1])}
    rows = [
        {"kind": "eval", "step": step, "split": split, "loss": 0.1, "r2": r2}
        for step, pair in scores.items()
        for split, r2 in zip(("iid", "compositional"), pair, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = {split: {"r2": r2, "r2_se": 0.01} for split, r2 in zip(("iid", "compositional"), scores[100], strict=True)}
    about = {"name": name, "digest": ph.digest(run), "steps": 100, "seconds": 1.0, "parameters": 9}
    result = about | {"scores": last, "command": "polyhead", "environment": {}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_picture_and_three_sentences(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SEQUENCES", 100)
    monkeypatch.setattr(report_codes, "POINTS", 40)
    made = [fabricate(tmp_path, "softmax", ph.Softmax(4)), fabricate(tmp_path, "hyla", ph.Hyla(4))]
    page = report.write(made, tmp_path / "report.html", progress=False).read_text(encoding="utf-8")
    header = page.partition("<header>")[2].partition("</header>")[0]
    assert header.index("<h1") < header.index("<figure>") < header.index('<p class="lead">') < header.index("<nav>")
    assert "<li>" not in header
    (lead,) = (html.unescape(found) for found in re.findall(r'<p class="lead">(.*?)</p>', header))
    assert lead.startswith(
        "In the second half of training Softmax gained 0.100 on known combinations and lost 0.250 on unseen "
        "combinations; HYLA gained 0.050 on known combinations and 0.200 on unseen combinations. From known to unseen "
        "combinations the score falls by 0.050 for Softmax and −0.100 for HYLA. The best predictor that composes"
    )
    assert len(re.findall(r"[.](?: |$)", lead)) == 3
    assert (
        "Compositional R² (one seed; ± is over test sequences), best first: Softmax" in page.partition("</header>")[2]
    )


@pytest.mark.parametrize(
    ("softmax", "words"),
    [
        (0.47, "Softmax and HYLA are level on unseen combinations (R² 0.47 and 0.45, one seed)"),
        (0.49, "Softmax is ahead on unseen combinations in these runs (R² 0.49)"),
    ],
)
def test_scores_of_one_seed_within_their_errors_are_level(
    softmax: float, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors over sequences of 0.01 each: 0.028 is two of the difference."""
    monkeypatch.setitem(COURSES, "softmax", ((0.5, 0.6), (0.8, softmax)))
    made = [fabricate(tmp_path, "softmax", ph.Softmax(4)), fabricate(tmp_path, "hyla", ph.Hyla(4))]
    assert headline.title(groups(read(made))) == words


def test_a_sentence_of_the_caller_comes_last_in_place_of_the_first(tmp_path: pathlib.Path) -> None:
    found = groups(read([fabricate(tmp_path, "softmax", ph.Softmax(4)), fabricate(tmp_path, "hyla", ph.Hyla(4))]))
    plain, rest = headline.opening(found, {})
    first, further = headline.opening(found, {}, "In full it is 0.9.")
    assert first == [*plain[1:], "In full it is 0.9."]
    assert further == [plain[0], *rest]
