"""Language models: the files of their figures, and verdicts on planted curves."""

import json
import math

import pytest
from drawn import draw
from planted import finished

from polyhead.analysis.claims import NO, UNDECIDED, YES, Estimate, constant
from polyhead.papers import page
from polyhead.papers.language import kinds, tokens
from polyhead.papers.language.models import LANGUAGE
from polyhead.papers.recipes import STUDIES
from polyhead.papers.reproduce import FIGURES, described, redraw
from polyhead.papers.study import Study
from polyhead.tasks import Text
from polyhead.tasks.scores import Score

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")

ZLIB = 1.81


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No text and no pictures."""
    monkeypatch.setattr(kinds.figures, "lines", lambda panels, **_: None)
    monkeypatch.setattr(kinds.figures, "save", lambda figure, path: path.write_text("</svg>"))
    monkeypatch.setattr(page, "figure_as_svg", lambda figure, caption, name: caption)
    monkeypatch.setattr(Text, "count", lambda task, split: 100)
    monkeypatch.setattr(Text, "fingerprint", lambda task: "a")
    monkeypatch.setattr(Text, "baselines", lambda task, split, **_: {"zlib": Score(ZLIB, 0.01, 10)})


def planted(run, folder, end, text="a"):
    """A finished run with `end` bits per byte at its end; each doubling of its steps took one bit off."""

    def scores(step):
        bits = end + math.log2(run.train.steps / step)
        return {"bits_per_byte": bits, "loss": bits * math.log(2), "perplexity": 2**bits}

    course = {step: scores(step) for step in range(1, run.train.steps + 1)}
    last = {**scores(run.train.steps), "accuracy": 0.5, "bits_per_byte_se": 0.001, "sequences": 101}
    return finished(run, folder, dict.fromkeys(run.train.evaluate, last), {"validation": course}, text=text)


@pytest.fixture
def study_of(tmp_path):
    """The study of a figure at scale smoke; a run ends at `end(run)`."""

    def make(figure, end, text=lambda run: "a", seeds=(0, 1)):
        runs = [run for run in STUDIES[figure]("smoke") if run.seed in seeds]
        results = [planted(run, tmp_path, end(run), text(run)) for run in runs]
        return Study.of(figure, FIGURES[figure].paper, "smoke", tmp_path, runs, results)

    return make


@pytest.fixture
def drawn(study_of):
    """The outcome of a figure; a run ends at `end(run)`, a little higher with each seed."""
    return lambda figure, end, *text: draw(study_of(figure, lambda run: end(run) * (1 + 0.001 * run.seed), *text))


def by_row(**ends):
    return lambda run: ends.get(LANGUAGE.row_of(run).replace("-", "_"), 2.0)


@pytest.mark.parametrize(
    ("figure", "end", "outcomes"),
    [
        # all reach 2.2; HYLA beats linear heads and is nearer to softmax heads; dual attention beats softmax heads;
        # disentangled heads beat softmax heads, and dual attention beats them
        ("lm-bytes", by_row(softmax=2.0, hyla=2.05, dual=1.8, disentangled=1.9, linear=2.15), [YES] * 6),
        ("lm-bytes", by_row(softmax=1.7, hyla=2.3, dual=2.0, disentangled=1.9, linear=2.1), [NO] * 6),
        # HYLA beats linear heads, and is nearer to softmax heads
        ("fig-6", by_row(softmax=1.8, hyla=1.9, linear=2.2), [YES, YES]),
        ("fig-6", by_row(softmax=1.9, hyla=1.8, linear=2.2), [YES, YES]),
        ("fig-6", by_row(softmax=1.8, hyla=2.2, linear=1.9), [NO, NO]),
    ],
)
def test_lower_is_better(figure, end, outcomes, drawn):
    assert [verdict.outcome for verdict in drawn(figure, end).verdicts] == outcomes


def test_the_table_has_a_row_for_each_kind_of_heads_and_courses_are_over_tokens(drawn, monkeypatch):
    drawn_panels = []
    monkeypatch.setattr(kinds.figures, "lines", lambda panels, **_: drawn_panels.append(panels))
    outcome = drawn("lm-bytes", by_row(dual=1.8))
    labels = ["Softmax", "HYLA", "Dual attention", "Softmax + disentangled", "Linear"]
    assert [row[0] for row in outcome.rows] == labels
    assert outcome.rows[2][1].startswith("1.801")
    assert outcome.rows[2][-3:] == ("10", "0.00", "2.0")
    assert any("zlib 1.810" in note for note in outcome.notes)
    ((_, series, levels),) = drawn_panels[0]
    tokens = [step * 4 * 16 / 1e6 for step in (1, 2, 3, 4)]
    assert list(series["Dual attention"]) == pytest.approx(tokens)
    assert series["Dual attention"][tokens[3]] == pytest.approx([1.8, 1.8018])
    assert levels == {"zlib": ZLIB}


@pytest.mark.parametrize("figure", ["lm-bytes", "dual-lm", "fig-6"])
def test_texts_that_differ_are_not_compared(figure, drawn):
    assert drawn(figure, lambda run: 2.0 - 0.1 * run.seed).verdicts
    mixed = drawn(figure, lambda run: 2.0 - 0.1 * run.seed, lambda run: str(run.seed))
    assert mixed.verdicts == ()
    assert mixed.rows
    assert any("several fingerprints" in note for note in mixed.notes)


def test_a_single_run_has_the_error_of_its_sequences(study_of):
    study = study_of("lm-bytes", lambda run: 1.8, seeds=(0,))
    end = kinds.ending(study.cells("model")["softmax"])
    assert (end.mean, end.error, end.freedom) == (pytest.approx(1.8), 0.001, 100.0)
    outcome = FIGURES["lm-bytes"].draw(study)
    assert {verdict.outcome for verdict in outcome.verdicts} == {UNDECIDED}
    assert outcome.pictures[0].caption.endswith("in the course of training; one seed.")


def test_all_seeds_and_models_are_scored_on_one_text(study_of, monkeypatch):
    """Its sampling error stays whatever the number of seeds, and cancels in differences; the text is not read."""
    monkeypatch.delattr(Text, "count")
    cells = study_of("fig-6", lambda run: 2.0 + 0.1 * run.seed * (LANGUAGE.row_of(run) == "hyla")).cells("model")
    softmax, hyla = (cells[name].score("iid") for name in ("softmax", "hyla"))
    assert (softmax.mean, softmax.error) == (2.0, pytest.approx(0.001))  # not 0.001 / sqrt(2)
    assert [estimate.error for estimate in (hyla, constant(2.2) - hyla)] == pytest.approx([math.hypot(0.05, 0.001)] * 2)
    difference = hyla - softmax
    assert (difference.error, difference.freedom) == (pytest.approx(0.05), 1.0)
    wider = Estimate.of(hyla.values, 0.03, finite=True, test=hyla.test) - softmax
    assert wider.error == pytest.approx(math.hypot(0.05, 0.029))
    assert (hyla - cells["softmax"].score("validation")).error == pytest.approx(math.hypot(0.05, 0.001, 0.001))


def test_tokens_to_a_perplexity(drawn, monkeypatch):
    """Bits fall by one with each doubling of tokens: 0.1 bits less at the end is the same with 6.7 % fewer tokens."""
    monkeypatch.setitem(tokens.LEVELS, "smoke", (16.0, 8.0))
    outcome = drawn("dual-lm", by_row(dual=2.4, softmax=2.5))
    assert [verdict.outcome for verdict in outcome.verdicts] == [YES, YES]
    assert "that both reach, 6.7% fewer" in str(outcome.verdicts[0])
    tokens_of_run = tokens.update_tokens(STUDIES["dual-lm"]("smoke")[0]) * 4 / 1e6  # of four steps
    row = next(row for row in outcome.rows if row[:2] == ("16", "Softmax"))
    assert float(row[3]) == pytest.approx(tokens_of_run * 2 ** (2.5 - 3), rel=0.02)
    assert any("16.94" in note for note in outcome.notes)
    worse = drawn("dual-lm", by_row(dual=2.5, softmax=2.4))
    assert [verdict.outcome for verdict in worse.verdicts] == [NO, NO]
    never = drawn("dual-lm", by_row(dual=5.0, softmax=2.5))
    (verdict,) = never.verdicts  # a perplexity that one of them does not reach is no evidence
    assert verdict.outcome == NO
    assert next(row for row in never.rows if row[:2] == ("16", "Dual attention"))[2:4] == ("–", "–")


def test_results_keep_their_text(study_of, tmp_path, monkeypatch):
    """Drawn from results.json: the same claims, and baselines only of the text that the runs read."""
    study = study_of("lm-bytes", by_row(hyla=1.9, dual=1.8, linear=2.1))
    figure = FIGURES["lm-bytes"]
    content = described(figure.title, study, figure.draw(study))
    assert {row["fingerprint"] for row in content["runs"]} == {"a"}
    folder = tmp_path / "kept"
    folder.mkdir()

    def redrawn():
        (folder / "results.json").write_text(json.dumps(content))
        return redraw(folder, tmp_path / "new")[1]

    assert list(redrawn().notes) == content["notes"]
    monkeypatch.setattr(Text, "fingerprint", lambda task: "b")
    outcome = redrawn()
    assert len(outcome.verdicts) == 6
    assert not any("zlib" in note for note in outcome.notes)
    assert "The text on this machine is not that of the runs: there are no baselines." in outcome.notes
    for row in content["runs"]:
        del row["fingerprint"]  # as in results of older versions
    outcome = redrawn()
    assert outcome.verdicts == ()
    assert "its fingerprint was not kept" in outcome.notes[0]
