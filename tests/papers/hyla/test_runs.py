"""The runs of the HYLA study: the models of Table A1, the settings of Table A3, the scale `short`; single recipes, with
changes for the demo and the original code."""

from dataclasses import replace

import pytest
import torch

import polyhead as ph
from polyhead.config import digest
from polyhead.papers.hyla.rows import HYLA, OURS, ROWS
from polyhead.papers.hyla.sizes import FUZZY, SRAVEN, fuzzy_task, make, sraven_task
from polyhead.papers.recipes import FIGURES, RECIPES, SHORT, STUDIES as ALL, default_scale
from polyhead.papers.sizes import Setting

STUDIES = {name: runs for name, runs in ALL.items() if FIGURES[name].paper is HYLA}


def tiny(task, row, seed=0):
    shape = replace({"fuzzy": FUZZY, "sraven": SRAVEN}[task]["smoke"], steps=3)
    made = fuzzy_task("smoke", seed, length=8) if task == "fuzzy" else sraven_task("smoke", seed)
    return make(made, row, shape, Setting(1e-2, 0.1, 1), seed)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("task", ["fuzzy", "sraven"])
@pytest.mark.parametrize("row", ROWS | OURS)
def test_every_parameter_of_every_model_has_a_gradient_on_both_tasks(task, row):
    run = tiny(task, row)
    torch.manual_seed(0)
    model = ph.Transformer(run.model)
    batch = run.task.batch("train", 16, seed=0, step=0)
    (run.task.loss(model(batch.inputs), batch) + model.auxiliary_loss()).backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert [name for name in untouched if not name.endswith(("qkv.bias", "gate.weight"))] == []
    assert HYLA.row_of(run) == row


def settings(runs):
    return {(run.train.lr, run.train.weight_decay, run.train.warmup) for run in runs}


def test_the_papers_grids():
    both = STUDIES["table-a3"]("paper")
    fuzzy = [run for run in both if isinstance(run.task, ph.tasks.FuzzyLogic)]
    sraven = [run for run in both if isinstance(run.task, ph.tasks.Sraven)]
    assert settings(fuzzy) == {(lr, wd, 100) for lr in (1e-3, 3e-3) for wd in (0.1, 0.03)}
    assert settings(sraven) == {(lr, wd, w) for lr in (1e-3, 3e-4) for wd in (0.1, 0.3) for w in (1000, 3000)}
    assert len(STUDIES["fig-2c"]("paper")) == 432  # as in the original sweep
    assert {(r.task.length, r.task.held_out) for r in STUDIES["fig-2c"]("paper")} == {
        (n, h) for n in (16, 32, 64, 96) for h in (0.3, 0.5, 0.7)
    }
    instances = {r.train.steps * r.train.batch_size for r in STUDIES["fig-4b"]("paper")}
    assert instances == {10_000_000, 20_000_000, 40_000_000}
    assert {r.model.layers for r in STUDIES["fig-4b"]("paper")} == {4, 8, 16}
    assert {r.model.dim for r in STUDIES["fig-4a"]("paper")} == {128, 256, 512}
    assert 1 in {r.model.layer_heads(0)[0].heads for r in STUDIES["fig-5c"]("paper")}


def test_the_short_scale_is_the_papers_network_trained_for_fewer_steps():
    for figure in SHORT:
        runs = STUDIES[figure]("short")
        assert {run.task.name for run in runs} == {"fuzzy_logic"}
        assert {run.seed for run in runs} == {0, 1, 2}
        assert all(run.task.split_seed == run.seed and run.train.steps == 15_000 for run in runs)
    for run in STUDIES["fig-2b"]("short"):
        whole = next(r for r in STUDIES["fig-2b"]("paper") if (r.name, r.train.lr) == (run.name, 1e-3))
        assert (run.task, run.model, run.seed) == (whole.task, whole.model, whole.seed)
        same = {"steps": 50_000, "eval_batches": 125, "eval_every": 12_500, "log_every": 833, "save_every": 12_500}
        assert replace(run.train, **same) == whole.train


def test_a_scale_that_a_figure_lacks_and_an_unknown_model_are_one_clear_line():
    without = [name for name in ALL if name not in SHORT]
    assert default_scale("fig-2c") == "short"
    assert {default_scale(name) for name in (*without, "table-a1")} == {"small"}
    for name in without:
        with pytest.raises(ValueError, match=r"^recipes: .*scale 'short'.*choose from paper, small, smoke"):
            ALL[name]("short")
    with pytest.raises(ValueError, match=r"recipes: unknown model 'hylla'; did you mean 'hyla'"):
        tiny("fuzzy", "hylla")


# ------------------------------------------------------------------------------------------------------- single recipes
DIGESTS = {"softmax": "c990094c150f", "linear": "ce4ef26ec0ec", "hyla": "86cd8c8e9c60"}
"""Of the folders of earlier runs, whose fields are the paper's."""


@pytest.mark.parametrize("row", DIGESTS)
def test_the_paper(row):
    run, short = RECIPES[f"fuzzy-{row}"]("paper"), RECIPES[f"fuzzy-{row}"]()
    assert (run.name, digest(run)) == (f"fuzzy-{row}", DIGESTS[row])
    assert (short.task, short.model, short.train.steps) == (run.task, run.model, 15_000)
    assert replace(run.train, steps=15_000, eval_batches=32, eval_every=2500) == short.train


@pytest.mark.parametrize("heads", ["softmax", "linear", "hyla"])
def test_the_original_code_differs_by_its_quirks(heads):
    recipe = RECIPES[f"fuzzy-{heads}"]
    run, paper = recipe("original"), recipe("paper")
    assert run.task == replace(paper.task, split="legacy")
    assert run.model == replace(paper.model, dropout=0.1, dropout_shared=True)
    decay = ph.Decay(qkv_biases=True, relative_bias=True)
    assert run.train == replace(paper.train, decay=decay, early_floor=True)
