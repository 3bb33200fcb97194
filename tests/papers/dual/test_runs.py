"""The runs of the dual-attention study: the papers' settings, and every model trains."""

import functools
from dataclasses import replace

import pytest

import polyhead as ph
from polyhead import train as training
from polyhead.models.size import parameters
from polyhead.papers.dual.models import DUAL as STUDY, ROWS
from polyhead.papers.recipes import FIGURES, RECIPES, STUDIES
from polyhead.tasks.relational_games.task import GAMES

DUAL = {name: runs for name, runs in STUDIES.items() if FIGURES[name].paper is STUDY}


@functools.cache
def runs_of(name, scale):
    return DUAL[name](scale)


WHOLE = ("games", "maths")
"""Studies of which every model trains here; of the others two models do."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, ROWS if name in WHOLE else ("dual", "softmax")) for name in DUAL],
    ids=lambda x: x if isinstance(x, str) else str(len(x)),
)
def test_every_model_of_a_study_trains(name, rows, tmp_path):
    found = {STUDY.row_of(run): run for run in reversed(runs_of(name, "smoke")) if STUDY.row_of(run) in rows}
    assert "dual" in found
    for row, run in found.items():
        run = replace(run, folder=str(tmp_path / row), device="cpu", name=row)
        run = replace(run, train=replace(run.train, steps=2, eval_batches=1))
        result = training.run(run, progress=False)
        assert result.steps == 2, row
        assert result.parameters == parameters(run.model), row
        assert set(result.scores) == set(run.train.evaluate), row


def games(scale):
    return [run for run in runs_of("games", scale) if run.seed == 0]


def test_games_are_the_papers():
    """How the other models differ from dual attention is in the digests of small runs: test_results.py."""
    runs = games("paper")
    one = {STUDY.row_of(run): run for run in runs if (run.task.game, run.task.examples) == ("occurs", 1000)}
    assert list(one) == list(ROWS)
    dual = one["dual"].model
    assert dual.heads == (ph.Softmax(1, 64, 64), ph.Relational(1, 64, 64, symbols=ph.PositionSymbols(), symmetric=True))
    assert (dual.dim, dual.layers, dual.feedforward, dual.dropout) == (128, 2, ph.Swiglu(256), 0.1)
    train = one["dual"].train
    assert (train.steps, train.batch_size, train.lr, train.final, train.warmup) == (100, 512, 1e-3, 1.0, 0)
    assert (train.betas, train.weight_decay, train.clip) == ((0.9, 0.99), 0.0, None)
    steps = {run.task.examples: run.train.steps for run in runs}
    assert (steps[250], steps[500], steps[2500], steps[25_000]) == (50, 50, 250, 2450)
    assert {run.task.game for run in runs} == set(GAMES)


def test_writers():
    one = {
        STUDY.row_of(run): run.model for run in DUAL["maths"]("paper") if run.seed == 0 and "expand" in run.task.module
    }
    dual = one["dual"]
    heads = (ph.Softmax(4, 16, 16), ph.Relational(4, 16, 16, symbols=ph.RelativeSymbols()))
    assert dual.heads == dual.encoder.heads == heads
    assert dual.causal
    assert not dual.encoder.causal
    assert (dual.encoder.max_length, dual.max_length) == (160, 31)
    assert (dual.norm_order, dual.positions) == ("post", ph.Sinusoidal())


def test_the_patches_of_the_papers_images_are_normalised():
    assert all(run.model.inputs.norm for run in runs_of("images", "paper"))
    assert {run.task.data for run in runs_of("images", "paper")} == {"cifar10", "cifar100"}


def test_single_recipes_are_runs_of_the_studies():
    for name, study in (("games", "games"), ("sorting", "sorting"), ("digits", "images"), ("maths", "maths")):
        run = RECIPES[f"{name}-dual"]()
        assert (run.name, STUDY.row_of(run), run.threads) == (f"{name}-dual", "dual", None)
        candidates = [r for r in runs_of(study, "small") if r.task == run.task and STUDY.row_of(r) == "dual"]
        alike = [r for r in candidates if replace(r, train=run.train, name=run.name, threads=None) == run]
        assert len(alike) == 1
        assert (alike[0].train == run.train) == (name in ("games", "sorting"))
