"""The report's section on networks trained in full: new scores, swapped codes and maps."""

import html
import pathlib
import re

import pytest

import polyhead as ph
from polyhead.pages.report import codes as report_codes, headline, trained, writer as report
from polyhead.pages.report.page import Page
from polyhead.tasks import FuzzyLogic

TASK = FuzzyLogic(variables=3, terms=2, length=8)


def run(folder: pathlib.Path, heads: ph.Softmax | ph.Hyla, seed: int) -> pathlib.Path:
    model = ph.TransformerConfig(*TASK.ends, dim=16, layers=2, heads=(heads,), max_length=8)
    train = ph.Train(steps=2, batch_size=16, eval_batches=1)
    name = f"{type(heads).__name__}-{seed}"
    config = ph.Run(name=name, task=TASK, model=model, train=train, seed=seed, threads=1, folder=str(folder / name))
    ph.train.run(config, progress=False)
    return folder / name


def test_scores_are_new_and_codes_are_swapped_and_mapped(tmp_path, monkeypatch):
    for name, value in (("SEQUENCES", 120), ("PAIRS", 20), ("POINTS", 40)):
        monkeypatch.setattr(trained, name, value)
    given = [run(tmp_path, ph.Softmax(4), 0), run(tmp_path, ph.Hyla(4), 0), run(tmp_path, ph.Hyla(4), 1)]
    full = trained.measure(given, ["iid", "compositional"], lambda line: None)
    assert [(group.label, len(group.entries)) for group in full.found] == [("Softmax", 1), ("HYLA", 2)]
    _, model = ph.load(given[0])
    wanted = ph.train.evaluate(model, TASK, "compositional", seed=0, batches=7, batch_size=16)["r2"]
    assert full.found[0].score("compositional").mean == pytest.approx(wanted)
    assert wanted != ph.train.read_result(given[0]).scores["compositional"]["r2"]
    assert [len(rows) for rows in full.swaps.values()] == [1, 2]
    assert full.swaps["HYLA"][1] == ph.analysis.swap_codes(ph.load(given[2])[1], TASK, pairs=20)
    out = Page()
    trained.section(out, full)
    page = html.unescape(re.sub(r"<[^>]+>", " ", "".join(out.parts)))
    assert all(words in page for words in ("HYLA: donor's function", "composes nothing", "2 seeds"))
    mean = sum(rows[1]["donor"] for rows in full.swaps["HYLA"]) / 2
    assert headline.number(mean) in page
    assert page.count("with the sequence's own code, the donor's and another's") == 2
    assert trained.sentence(full).startswith("Trained in full (2 steps, ")
    assert "The training had 2 steps." in page  # no word of models that come with polyhead: these do not
    assert "the scores on 112 sequences a split" in page  # 7 whole batches of 16, not the 120 that were asked for
    index = {str(entry.folder): {"digest": ph.digest(entry.run)} for group in full.found for entry in group.entries}
    monkeypatch.setattr(trained.shipped, "models", lambda: index)
    trained.section(ours := Page(), full)
    assert "These models come with polyhead (polyhead list models); their training had 2 steps." in "".join(ours.parts)
    bars = [trace for trace in out.figures[0]["data"] if trace["type"] == "bar"]
    assert [trace["name"] for trace in bars] == ["Softmax", "HYLA"]
    assert all(min(trace["y"]) >= -1 for trace in bars)
    assert sum(figure["maps"] is not None for figure in out.figures) == len(out.figures) - 1


@pytest.mark.parametrize(
    ("donor", "other", "says"),
    [
        (0.8, 0.1, "the output follows the donor."),
        (0.3, 0.0, "the output moves towards the donor, but does not follow it."),
        (0.3, 0.25, "the output does not follow the donor."),
    ],
)
def test_what_came_of_a_swap_is_said(donor, other, says):
    scores = {"own": (-0.5, 0.9), "donor": (donor, 0.0), "other": (other, 0.0)}
    rows = [
        {"code": code, "donor": to_donor, "own": to_own, "donor_se": 0.05, "own_se": 0.05}
        for code, (to_donor, to_own) in scores.items()
    ]
    line = trained._moved("HYLA", [rows], "R²")
    assert says in line
    assert f"is −0.50, {donor:.2f}, {other:.2f} with" in line
    assert line.endswith("A sequence's own score is 0.90.")


def test_the_page_says_it_first_and_has_the_section(tmp_path, monkeypatch):
    given, full = [run(tmp_path, ph.Softmax(4), 0)], []
    for name, value in (("POINTS", 40), ("PROBED", 64), ("ZEROED", 8)):
        monkeypatch.setattr(report_codes, name, value)
    measured = trained.Trained([], [], {}, {}, [])
    monkeypatch.setattr(report, "SEQUENCES", 100)
    monkeypatch.setattr(report, "measure", lambda names, splits, say: full.append((names, splits)) or measured)
    monkeypatch.setattr(report, "sentence", lambda it: "In full: measured." * (it is measured))
    monkeypatch.setattr(report, "trained_section", lambda out, it: out.add("<p>the section</p>" * (it is measured)))
    path = report.write(given, tmp_path / "r.html", trained=["fuzzy-hyla"], progress=False)
    page = path.read_text(encoding="utf-8")
    assert full == [(["fuzzy-hyla"], ["iid", "compositional"])]
    assert page.index("In full: measured.") < page.index("<p>the section")
