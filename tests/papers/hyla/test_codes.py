"""Figures of the latent code, on tiny trained models of both tasks; verdicts on planted codes."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from polyhead import train
from polyhead.analysis.claims import NO, NO_DIFFERENCE, UNDECIDED, YES
from polyhead.config import digest
from polyhead.papers.hyla import codes as code_figures, probes as code_probes
from polyhead.papers.recipes import STUDIES
from polyhead.papers.reproduce import FIGURES
from polyhead.papers.study import Study
from polyhead.tasks.sraven.task import RULES

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Trained at scale smoke: fuzzy logic and SRAVEN, three models, two seeds."""
    folder = tmp_path_factory.mktemp("codes")

    def study_of(figure):
        runs = STUDIES[figure]("smoke")
        results = [train.run(replace(run, folder=str(folder / digest(run))), progress=False) for run in runs]
        return Study.of(figure, FIGURES[figure].paper, "smoke", folder, runs, results)

    return {"fuzzy": study_of("fig-2b"), "sraven": study_of("fig-5b")}


def drawn(studies, figure):
    return FIGURES[figure].draw(replace(studies["fuzzy" if figure.startswith("fig-2") else "sraven"], figure=figure))


@pytest.mark.parametrize("figure", ["fig-2d", "fig-5a", "fig-5b", "fig-5e"])
def test_every_figure_is_drawn(figure, studies):
    outcome = drawn(studies, figure)
    assert all(picture.figure.get_axes() for picture in outcome.pictures)
    stems = {picture.stem.removeprefix(f"{figure}-") for picture in outcome.pictures}
    assert stems == ({"fig-5e"} if figure == "fig-5e" else {"hyla", "softmax", "linear"})  # a map for each model
    if figure == "fig-5b":  # its classes are named in a legend
        assert "difference" in {text.get_text() for text in outcome.pictures[0].figure.findobj(Text)}


def test_probes_cover_the_papers_pairs_and_the_codes(studies):
    terms, rules = drawn(studies, "fig-2b"), drawn(studies, "fig-5f")
    assert {row[0].split(",")[0] for row in terms.rows} == {"term 1", "term 2"}
    assert {row[0] for row in rules.rows} == {
        f"{target}{pairs}, layer 1" for target in ("rule", "target value") for pairs in ("", ", last row")
    }
    assert len(next(iter(rules.numbers.values()))["hyla"]["by_seed"]) == 2
    assert [len(verdict.parts) for verdict in terms.verdicts] == [6, 6]  # two terms, three models


def test_the_untrained_network_is_that_before_the_first_step(studies, tmp_path):
    run = studies["fuzzy"].points[-1].run
    train.run(replace(run, folder=str(tmp_path), train=replace(run.train, lr=0.0, steps=1)), progress=False)
    random_state = torch.get_rng_state()
    before, after = code_probes.untrained(run).state_dict(), train.load_model(tmp_path)[1].state_dict()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    other = code_probes.untrained(replace(run, seed=run.seed + 1)).state_dict()
    assert any(not torch.equal(before[name], x) for name, x in other.items())


def test_what_training_puts_into_a_code(studies, monkeypatch):
    """Scores are planted: a probe finds 0.1 more than before training, 0.1 less, or as much; permuted labels 0.15."""
    study = replace(studies["fuzzy"], figure="fig-2b")
    study = replace(study, points=tuple(p for p in study.points if "hyla" in p.run.name))
    fresh = {p.run.task: [*code_probes.untrained(p.run).parameters()] for p in study.points}

    def outcome_with(gain):
        def probe_model(model, task, **_):
            trained = any(not torch.equal(x, y) for x, y in zip(model.parameters(), fresh[task], strict=True))
            f1 = 0.2 + 0.002 * task.split_seed + gain * trained
            chance = 0.15 + 0.004 * task.split_seed + 0.3 * (not trained)
            return [{"target": "term 1", "pairs": "self", "query": "alone", "layer": 0, "f1": f1, "chance": chance}]

        monkeypatch.setattr(code_probes, "probe_model", probe_model)
        return FIGURES["fig-2b"].draw(study)

    outcomes = [outcome_with(gain) for gain in (0.1, -0.1, 0.0)]
    verdicts = [[verdict.outcome for verdict in outcome.verdicts] for outcome in outcomes]
    assert verdicts == [[YES, YES], [UNDECIDED, NO], [YES, NO_DIFFERENCE]]
    assert outcomes[0].head == ("probe", "HYLA", "HYLA, untrained", "HYLA, permuted labels")
    assert outcomes[0].rows == (("term 1, one context, layer 1", "0.301 ± 0.001", "0.201 ± 0.001", "0.152 ± 0.002"),)


def planted(monkeypatch, codes_of, before=None, noise=(0.01, 0.01)):
    """Every model's codes are `codes_of(layer, rules, sizes)`; `before`: those of networks before their first step."""
    rng = np.random.default_rng(0)

    def query_codes(model, task, split, count, **_):
        batch = task.batch(split, count, seed=3, step=0)
        rules, sizes = batch.latents["query_rules"][:, -1].numpy(), task.input_sizes(batch).int().numpy()
        codes_of_model = codes_of if model is not None else before
        noisy = []
        for layer in range(2):
            noisy.append(codes_of_model(layer, rules, sizes) + noise[layer] * rng.standard_normal((count, 4)))
        return noisy, batch

    monkeypatch.setattr(sys.modules["polyhead.analysis.probe"], "query_codes", query_codes)
    monkeypatch.setattr(code_figures, "query_codes", query_codes)
    if before is not None:
        monkeypatch.setattr(code_figures, "untrained", lambda run: None)


def directions(count, seed):
    return np.random.default_rng(seed).standard_normal((count, 4))


def test_layers_that_turn_from_size_to_rule(studies, monkeypatch):
    size, rule = directions(9, 1), directions(8, 2)
    planted(monkeypatch, lambda layer, rules, sizes: rule[rules] if layer else size[sizes])
    forward = drawn(studies, "fig-5b")
    planted(monkeypatch, lambda layer, rules, sizes: size[sizes] if layer else rule[rules])
    backward = drawn(studies, "fig-5b")
    assert (forward.verdicts[0].outcome, backward.verdicts[0].outcome) == (YES, NO)
    assert forward.head[1:3] == ("HYLA", "HYLA, untrained")
    assert len(forward.rows) == 6  # three targets, two layers


def test_a_layer_with_one_code_for_all_is_no_early_layer(studies, monkeypatch):
    """Of two layers one is left, which is too few for a claim."""
    rule = directions(8, 2)
    planted(monkeypatch, lambda layer, rules, sizes: layer * rule[rules], noise=[0, 0.01])
    assert drawn(studies, "fig-5b").verdicts == ()


def test_sum_and_difference_with_one_code(studies, monkeypatch):
    distinct = np.eye(8)[:, :4] + np.roll(np.eye(8), 3, axis=1)[:, :4] + directions(8, 3)
    shared, opposite = distinct.copy(), distinct.copy()
    shared[RULES.index("difference")] = shared[RULES.index("sum")]
    opposite[RULES.index("difference")] = -opposite[RULES.index("sum")]

    def of_rules(codes):
        return lambda layer, rules, sizes: codes[rules]

    for codes, before, expected in ((shared, opposite, YES), (opposite, shared, NO)):
        planted(monkeypatch, of_rules(codes), of_rules(before))
        outcome = drawn(studies, "fig-5e")
        assert outcome.verdicts[0].outcome == expected
        numbers = outcome.numbers["sum and difference over other pairs"]
        trained, untrained = numbers["plain"]["mean"], numbers[f"plain{code_probes.UNTRAINED}"]["mean"]
        assert (trained > 0) == (untrained < 0) == (expected == YES)
