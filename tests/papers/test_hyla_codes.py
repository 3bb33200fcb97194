"""Figures of the latent code, on tiny trained models of both tasks; verdicts on planted codes."""

import functools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from some import some

from polyhead import train
from polyhead.config import digest
from polyhead.papers import claims
from polyhead.papers.claims import FAILS, HOLDS
from polyhead.papers.hyla import codes as code_figures
from polyhead.papers.recipes import STUDIES
from polyhead.papers.reproduce import FIGURES
from polyhead.papers.study import Study
from polyhead.tasks.sraven.task import RULES

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Trained at scale smoke: fuzzy logic and SRAVEN, three models, two seeds."""
    folder = tmp_path_factory.mktemp("codes")

    def of(figure):
        runs = STUDIES[figure]("smoke")
        short = [replace(run, folder=str(folder / digest(run))) for run in runs]
        return Study.of(
            figure, FIGURES[figure].paper, "smoke", folder, runs, [train.run(run, progress=False) for run in short]
        )

    return {"fuzzy": of("fig-2b"), "sraven": of("fig-5b")}


FUZZY = ("fig-2b", "fig-2d", "fig-a2")
SRAVEN = ("fig-5a", "fig-5b", "fig-5e", "fig-5f", "fig-a6", "fig-a8")


MORE = ("fig-a2", "fig-a6", "fig-a8")
"""Maps and probes beside others of their kind: for the campaign."""


def states(study):
    """Parameters of a study's first model, as its folder has them."""
    return {name: x.clone() for name, x in train.load_model(study.points[0].result.folder)[1].state_dict().items()}


@pytest.fixture(scope="module")
def drawn(studies, tmp_path_factory):
    """(outcome, folder, whether its models were left as they were) of a figure, drawn once."""

    @functools.cache
    def draw(figure):
        study = replace(studies["fuzzy" if figure in FUZZY else "sraven"], figure=figure)
        before, folder = states(study), tmp_path_factory.mktemp(figure)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(claims, "SEEDS", 2)
            found = FIGURES[figure].draw(study, folder)
        after = states(study)
        return found, folder, all(torch.equal(x, after[name]) for name, x in some(before.items()))

    return draw


@pytest.mark.parametrize(
    "figure", [pytest.param(name, marks=[pytest.mark.campaign] * (name in MORE)) for name in (*FUZZY, *SRAVEN)]
)
def test_every_figure_is_drawn(figure, drawn):
    found, folder, untouched = drawn(figure)
    assert untouched
    assert found.pictures
    for stem, _ in found.pictures:
        assert (folder / f"{stem}.svg").stat().st_size > 2000
    if figure in ("fig-2d", "fig-a2", "fig-5a", "fig-5b", "fig-a6"):  # a map for each model
        assert {stem.removeprefix(f"{figure}-") for stem, _ in found.pictures} == {"hyla", "softmax", "linear"}
    if figure == "fig-5b":  # its classes are named in a legend
        assert "<!-- difference -->" in (folder / f"{found.pictures[0][0]}.svg").read_text(encoding="utf-8")
    assert all(len(row) == len(found.head) for row in found.rows)


def test_probes_cover_the_papers_pairs_and_the_codes(drawn):
    terms, rules = (drawn(figure)[0] for figure in ("fig-2b", "fig-5f"))
    assert {row[0].split(",")[0] for row in terms.rows} == {"term 1", "term 2"}
    assert {row[0] for row in rules.rows} == {
        f"{target}{pairs}, layer 1" for target in ("rule", "target value") for pairs in ("", ", last row")
    }
    assert len(next(iter(rules.numbers.values()))["hyla"]["by_seed"]) == 2


def planted(monkeypatch, codes_of):
    """Every model's codes are `codes_of(layer, rules, values)`."""
    rng = np.random.default_rng(0)

    def query_codes(model, task, split, count, **_):
        batch = task.batch(split, count, seed=3, step=0)
        rules, values = batch.latents["query_rules"][:, -1].numpy(), batch.targets[:, -1].numpy()
        noise = 0.01 * rng.standard_normal((count, 4))
        return [codes_of(layer, rules, values) + noise for layer in range(2)], batch

    monkeypatch.setattr(sys.modules["polyhead.analysis.probe"], "query_codes", query_codes)
    monkeypatch.setattr(code_figures, "query_codes", query_codes)


def directions(count, seed):
    return np.random.default_rng(seed).standard_normal((count, 4))


def test_layers_that_turn_from_magnitude_to_rule(studies, tmp_path, monkeypatch):
    value, rule = directions(5, 1), directions(8, 2)
    study = replace(studies["sraven"], figure="fig-5b")
    planted(monkeypatch, lambda layer, rules, values: rule[rules] if layer else value[values])
    forward = FIGURES["fig-5b"].draw(study, tmp_path)
    planted(monkeypatch, lambda layer, rules, values: value[values] if layer else rule[rules])
    backward = FIGURES["fig-5b"].draw(study, tmp_path)
    assert (forward.verdicts[0].outcome, backward.verdicts[0].outcome) == (HOLDS, FAILS)


def test_sum_and_difference_with_one_code(studies, tmp_path, monkeypatch):
    own = np.eye(8)[:, :4] + np.roll(np.eye(8), 3, axis=1)[:, :4] + directions(8, 3)
    shared = own.copy()
    shared[RULES.index("difference")] = shared[RULES.index("sum")]
    apart = own.copy()
    apart[RULES.index("difference")] = -apart[RULES.index("sum")]
    study = studies["sraven"]
    points = tuple(p for p in study.points if {5, 6} <= set(p.run.task.rules("compositional").flatten().tolist()))
    assert len(points) == len(study.points)
    outcomes = []
    for codes in (shared, apart):
        planted(monkeypatch, lambda layer, rules, values, codes=codes: codes[rules])
        outcomes.append(FIGURES["fig-5e"].draw(replace(study, figure="fig-5e"), tmp_path).verdicts[0].outcome)
    assert outcomes == [HOLDS, FAILS]
