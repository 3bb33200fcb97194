"""Inside the long trainings: the difference that the test of the swap takes, and the page of three tiny networks."""

from dataclasses import replace

import pandas
import pytest

from polyhead.analysis.claims import NO, UNDECIDED, YES
from polyhead.config import Train
from polyhead.papers.hyla import inside
from polyhead.papers.hyla.long import LONG
from polyhead.papers.recipes import RECIPES
from polyhead.papers.study import Study
from polyhead.tasks import FuzzyLogic
from polyhead.train import run

SPREAD = (-0.01, 0.01, 0.0, -0.005, 0.005)


def swapped(lead, seeds=5):
    """R² against the donor's function is `lead` higher with its code than with a third sequence's."""
    by_seed = {seed: 0.1 * seed for seed in range(1, seeds + 1)}
    scores = {("other", "donor"): by_seed, ("donor", "own"): by_seed, ("own", "own"): by_seed}
    scores["donor", "donor"] = {seed: value + lead + SPREAD[seed - 1] for seed, value in by_seed.items()}
    columns = {(model, *codes): values for model in ("hyla", "softmax") for codes, values in scores.items()}
    return pandas.DataFrame(columns)


@pytest.mark.parametrize(("lead", "seeds", "outcome"), [(0.1, 5, YES), (-0.1, 5, NO), (0.1, 4, UNDECIDED)])
def test_the_swap_is_tested_for_hyla_against_a_third_sequences_code_seed_by_seed(lead, seeds, outcome):
    (verdict,) = inside.verdicts(swapped(lead, seeds))
    assert verdict.outcome == outcome
    assert verdict.family == "swap"
    (part,) = verdict.parts
    assert part.estimate.values == pytest.approx({seed: lead + SPREAD[seed - 1] for seed in range(1, seeds + 1)})
    assert inside.verdicts(swapped(lead, seeds)[["softmax"]]) == inside.repeated(swapped(lead, seeds)) == []


def test_the_page_has_swaps_and_probes_of_every_finished_model(tmp_path, monkeypatch):
    monkeypatch.setattr(inside, "PAIRS", 60)
    runs, results = [], []
    for row in ("hyla", "softmax", "linear"):
        name = f"{row}-1"
        task = FuzzyLogic(variables=3, terms=2, length=8, split_seed=1)
        recipe = RECIPES[f"fuzzy-{row}"]()
        model = replace(recipe.model, inputs=task.ends[0], outputs=task.ends[1], max_length=task.length, dim=16)
        train = Train(steps=2, batch_size=8, evaluate=("validation", "compositional"), eval_batches=1)
        tiny_run = replace(recipe, name=name, task=task, model=model, train=train, seed=1, folder=str(tmp_path / name))
        results.append(run(tiny_run, progress=False))
        runs.append(replace(tiny_run, folder=None))
    runs.append(replace(runs[0], name="hyla-6", seed=6))
    results.append(results[0])
    study = Study.of("inside", LONG, "smoke", tmp_path / "page", runs, results)
    outcome = inside.draw(study)
    assert outcome.head == ("subject", "score", "HYLA", "Softmax", "Linear")
    assert len(outcome.rows) == 2 * len(inside.CODES) + 2 * 3 + 2 * 2 + 2
    assert [verdict.family for verdict in outcome.verdicts] == ["swap", "probes", "probes", "clusters"]
    assert all("Linear" not in part.name for verdict in outcome.verdicts for part in verdict.parts)
    numbers = outcome.numbers["HYLA"]
    assert set(numbers["its own, against its own function"]["by_seed"]) == {"1"}  # seed 6 is no part of it
    assert numbers["its own, against its own function"] == numbers["share 0, against its own function"]
    donor = "against the donor's function"
    assert numbers[f"the donor's, {donor}"] == numbers[f"share 1, {donor}"] != numbers[f"its own, {donor}"]
    assert outcome.pictures[0].stem == "inside"
    r2 = outcome.numbers["R² on unseen combinations"]
    assert r2["the mean over sequences, HYLA"] != r2["over all queries together, HYLA"]
