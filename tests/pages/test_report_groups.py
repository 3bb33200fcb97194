"""Groups of runs in a report have names of their own; floors say of how many sequences they are."""

import itertools
import pathlib
from dataclasses import replace

import pytest

import polyhead as ph
from polyhead.analysis import figures
from polyhead.pages.report import headline
from polyhead.pages.report.export import _over_layers
from polyhead.pages.report.runs import Entry, Summary, baselines, groups
from polyhead.tasks import FuzzyLogic
from polyhead.tasks.task import Score

TASK = FuzzyLogic(variables=3, terms=2, length=8)
RUN = ph.Run(task=TASK, model=ph.TransformerConfig(*TASK.ends, dim=16, heads=(ph.Softmax(4),), max_length=8))


def entry(run: ph.Run) -> Entry:
    return Entry(pathlib.Path("run"), run, (), None, ())


def test_labels_are_unique_however_many_settings_differ() -> None:
    """Of four settings only three were named, and two groups of one name became one in figures and tables."""
    runs = [
        replace(
            RUN,
            seed=seed,
            model=replace(RUN.model, dim=dim),
            train=replace(RUN.train, lr=lr, batch_size=size, weight_decay=decay),
        )
        for dim, lr, size, decay, seed in itertools.product((16, 32), (1e-3, 3e-3), (16, 32), (0.1, 0.3), (0, 1))
    ]
    found = groups([entry(run) for run in runs])
    assert len({group.label for group in found}) == len(found) == 16
    assert {len(group.entries) for group in found} == {2}
    assert found[1].label == "Softmax · dim 16 · batch_size 16 · lr 0.001 · weight_decay 0.3"
    few = groups([entry(run) for run in runs if run.train.weight_decay == 0.1])
    assert {group.label.count("·") for group in few} == {3}


def test_a_still_figure_of_probes_has_the_chance_of_all_mechanisms(monkeypatch) -> None:
    """It had that of the last one; the page has the mean."""
    score = Summary(0.5, 0.1, (0.4, 0.6), "seeds")
    cells = {("HYLA", (1, "rule")): (score, 0.1, 64), ("Softmax", (1, "rule")): (score, 0.3, 64)}
    monkeypatch.setattr(figures, "lines", lambda panels, path, **how: panels)
    ((target, series, levels),) = _over_layers(cells, "macro F1")(pathlib.Path("a.png"))
    assert (target, series) == ("rule", {"HYLA": {2: [0.4, 0.6]}, "Softmax": {2: [0.4, 0.6]}})
    assert levels == {"chance": {2: pytest.approx(0.2)}}


def test_floors_say_of_how_many_sequences_they_are(monkeypatch) -> None:
    asked = []

    def floors(self, split: str, *, sequences: int) -> dict[str, Score]:
        asked.append(sequences)
        return {"mix": Score(0.5, 0.1, sequences)}

    monkeypatch.setattr(FuzzyLogic, "floors", floors)
    monkeypatch.setattr(FuzzyLogic, "count", lambda self, split: 500 if split == "novel" else None)
    runs = [replace(RUN, seed=seed, task=replace(TASK, split_seed=seed)) for seed in range(3)]
    table = baselines(
        groups([entry(run) for run in runs]), ["iid", "novel"], sequences=2000, progress=lambda line: None
    )
    assert asked == [666] * 6
    assert (table["mix"]["iid"].count, table["mix"]["novel"].count) == (1998, 1500)
    assert headline.span(row.count for row in table["mix"].values()) == "1,500 to 1,998"
    assert headline.span([2000, 2000]) == "2,000"
