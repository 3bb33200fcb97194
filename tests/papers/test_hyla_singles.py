"""The recipes have the settings of Schug et al. 2024, table A1; changes for the demo and the original code."""

from dataclasses import replace

import pytest

import polyhead as ph
from polyhead.config import digest
from polyhead.papers import demo
from polyhead.papers.recipes import RECIPES

DIGESTS = {"fuzzy-softmax": "c990094c150f", "fuzzy-linear": "ce4ef26ec0ec", "fuzzy-hyla": "86cd8c8e9c60"}
HEADS = {"fuzzy-softmax": ph.Softmax, "fuzzy-linear": ph.Linear, "fuzzy-hyla": ph.Hyla}


@pytest.mark.parametrize("name", HEADS)
def test_the_paper(name):
    run = RECIPES[name]("paper")
    task = ph.tasks.FuzzyLogic(variables=4, terms=2, length=32, held_out=0.7)
    model = ph.TransformerConfig(
        *(ph.Vectors(5), ph.Values(1)),
        dim=128,
        layers=2,
        heads=[HEADS[name](8, dim=2, value_dim=2)],
        feedforward=ph.Mlp(256, "gelu_tanh"),
        positions=ph.RelativeBias(),
        max_length=32,
        norm_eps=1e-6,
        bias=True,
        init="hyla",
    )
    assert (run.name, run.task, run.model) == (name, task, model)
    train = run.train
    assert (train.steps, train.batch_size, train.lr, train.warmup, train.final) == (50_000, 128, 1e-3, 100, 0.1)
    assert (train.weight_decay, train.decay, train.clip) == (0.1, ph.Decay(), None)
    assert train.evaluate == ("iid", "compositional", "novel")
    assert digest(run) == DIGESTS[name]  # folders of earlier runs
    short = RECIPES[name]()
    assert (short.task, short.model, short.train.steps) == (task, model, 15_000)
    assert replace(train, steps=15_000, eval_batches=32, eval_every=2500) == short.train


def test_the_original_code_differs_by_its_quirks():
    run, paper = RECIPES["fuzzy-original"](), RECIPES["fuzzy-hyla"]("paper")
    assert run.task == replace(paper.task, split="legacy")
    assert run.model == replace(paper.model, dropout=0.1, dropout_shared=True)
    decay = ph.Decay(qkv_biases=True, relative_bias=True)
    assert run.train == replace(paper.train, decay=decay, early_floor=True)


def test_the_demo_compares_heads_and_nothing_else():
    """The paper's network, fewer steps, the rate of the long trainings; seed 0, which a pilot run used, is left out."""
    race, fuzzy = demo.race(), demo.fuzzy()
    assert RECIPES["demo"]() == (*race, *fuzzy)
    paper = {"hyla": RECIPES["fuzzy-hyla"]("paper"), "softmax": RECIPES["fuzzy-softmax"]("paper")}
    for run in fuzzy:
        wanted = paper[run.name.partition("-")[0]]
        assert run.model == wanted.model
        assert run.task == replace(wanted.task, split_seed=run.seed)
        scoring = {
            n: getattr(run.train, n) for n in ("steps", "lr", "evaluate", "eval_batches", "eval_every", "log_every")
        }
        assert run.train == replace(wanted.train, **scoring)
        assert run.train.lr == 3e-3
    assert [(run.name, run.seed) for run in fuzzy] == [("hyla-1", 1), ("softmax-1", 1)]
    assert sorted({run.seed for run in race}) == [1, 2]
    alike = {replace(run, name="", model=race[0].model, seed=0, task=replace(run.task, split_seed=0)) for run in race}
    assert len(alike) == 1
