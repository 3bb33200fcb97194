"""Members whose tasks hold out different combinations, because in the study a seed also changes the split."""

import math
from dataclasses import replace

import pytest

import polyhead as ph
from polyhead import train
from polyhead.config import digest
from polyhead.scale.population import training as population
from polyhead.train.store.folder import read_metrics


@pytest.mark.parametrize(
    ("task", "at_once"), [(ph.tasks.FuzzyLogic(length=8), 4), (ph.tasks.Sraven(features=2, values=4), 1)]
)
def test_members_with_other_splits_are_trained_as_alone(tiny, tmp_path, task, at_once):
    ends = {"inputs": task.ends[0], "outputs": task.ends[1], "max_length": task.length, "residual_dropout": 0.0}
    splits = [replace(task, split_seed=seed) for seed in (2, 0, 2, 1)]  # seeds and splits in no common order
    evaluate = ("iid", "compositional")
    ends |= {"steps": 5, "eval_every": 5}
    runs = [
        tiny(None, name=f"r{i}", seed=(5, 6, 6, 5)[i], task=split, evaluate=evaluate, lr=1e-3 * (i + 1), **ends)
        for i, split in enumerate(splits)
    ]
    assert len(population.groups(runs)) == 1
    together = population.train(runs, tmp_path / "together", progress=False, at_once=at_once)
    for run, result in zip(runs, together, strict=True):
        alone = train.run(replace(run, folder=str(tmp_path / "alone" / digest(run))), progress=False)
        ours, theirs = (read_metrics(one.folder) for one in (result, alone))
        losses = [[row["loss"] for row in rows if row["kind"] == "train"] for rows in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=5e-3)  # in float32; other data would differ by tenths
        for split in evaluate:
            assert result.scores[split]["loss"] == pytest.approx(alone.scores[split]["loss"], rel=5e-3)


def test_the_last_window_of_a_text_counts_as_alone(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} is {i**2 % 97}\n" for i in range(400)))
    task = ph.tasks.Text(str(tmp_path / "text.txt"), length=24, folder=str(tmp_path / "tokens"))
    count = task.count("iid")
    assert not task.batch("iid", count, seed=0, step=0).scored.all()
    ends = {"inputs": task.ends[0], "outputs": task.ends[1], "max_length": 24, "residual_dropout": 0.0, "causal": True}
    ends |= {"steps": 1, "eval_every": 1, "eval_batches": count, "task": task, "evaluate": ("iid",)}
    runs = [tiny(None, name=f"r{seed}", seed=seed, **ends) for seed in (0, 1)]
    for result in population.train(runs, tmp_path / "together", progress=False, at_once=2):
        scores = result.scores["iid"]
        assert scores["sequences"] == count
        assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / math.log(2), rel=1e-6)


def test_tasks_that_differ_otherwise_stay_apart(tiny):
    task = ph.tasks.FuzzyLogic(length=8)
    runs = [tiny(None, task=one, residual_dropout=0.0) for one in (task, replace(task, held_out=0.3))]
    assert len(population.groups(runs)) == 2


def test_a_gradient_too_large_to_measure_is_the_trouble_of_one_member(tiny, tmp_path, monkeypatch):
    """Its loss is finite, its norm is not: the line for the person who watches is a mean of both."""
    step = population.Stack.step

    def overflowing(stack, number, *, wanted=False):
        values = step(stack, number, wanted=wanted)
        if wanted:
            values["grad_norm"][1] = float("inf")
        return values

    monkeypatch.setattr(population.Stack, "step", overflowing)
    runs = [tiny(None, seed=seed, residual_dropout=0.0) for seed in (0, 1)]
    results = population.train(runs, tmp_path, progress=True)
    assert all(isinstance(result, train.Result) for result in results)
    norms = [[row["grad_norm"] for row in read_metrics(r.folder) if row["kind"] == "train"] for r in results]
    assert None not in norms[0]
    assert set(norms[1]) == {None}
