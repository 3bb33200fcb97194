"""The runs of every figure: names, digests and splits; models that are compared are alike in all else."""

import functools
import hashlib
import json
import pathlib
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from some import some

import polyhead as ph
from polyhead import train as training
from polyhead.config import digest
from polyhead.models.size import parameters
from polyhead.papers.dual.models import CLOSE, DUAL
from polyhead.papers.hyla.rows import HYLA, OURS, ROWS
from polyhead.papers.hyla.runs import FUZZY, SRAVEN, fuzzy_task, make, sraven_task
from polyhead.papers.language.models import LANGUAGE
from polyhead.papers.recipes import FIGURES, RECIPES, SHORT, STUDIES, default_scale
from polyhead.papers.reproduce import runs_of as runs_for
from polyhead.papers.sizes import Setting

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "small"
DISTINCT = {recipe: name for name, recipe in STUDIES.items()}.values()
"""One figure for each set of runs."""


@functools.cache
def runs_of(figure, scale):
    return STUDIES[figure](scale)


size = functools.cache(parameters)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure", DISTINCT)
def test_the_runs_of_a_figure(figure):
    for scale in ("smoke", "small"):
        runs = runs_of(figure, scale)
        assert len({digest(run) for run in runs}) == len(runs)
        for run in runs:
            FIGURES[figure].paper.row_of(run)  # raises for a model of no row
            assert run.name.endswith(f"-{run.seed}")
            assert getattr(run.task, "split_seed", run.seed) == run.seed
            assert run.train.evaluate[0] == "validation"
            assert set(run.train.evaluate) & {"iid", "compositional"}


def test_runs_that_figures_share_have_one_name():
    """They share a folder, so that they are trained once."""
    names = {}
    for figure in DISTINCT:
        for run in runs_of(figure, "small"):
            assert names.setdefault(digest(run), run.name) == run.name


@pytest.mark.parametrize("figure", STUDIES)
def test_kept_runs_are_those_of_the_recipes(figure):
    results = json.loads((RESULTS / figure / "results.json").read_text())
    recipe_runs = {digest(run): run.name for run in runs_for(FIGURES[figure], results["scale"], results.get("seeds"))}
    assert {row["digest"]: row["name"] for row in some(results["runs"])}.items() <= recipe_runs.items()


# fmt: off
PAPER = {
    "fig-2b": "5a4fa9138df4", "fig-2c": "addac6e83fb1", "fig-4a": "86099032cc9f", "fig-4a-heads": "af053a46787a",
    "fig-4b": "8d6fa3b07e43", "fig-5f": "b97dc74e10ec", "fig-5c": "b9f317d38270", "fig-5d": "898cd2833be0",
    "fig-a5": "2fc1f6745ea0", "fig-a7": "c6d362ab8626", "table-a1": "86983cae9b82", "table-a3": "6f4983570dc2",
    "games": "5ed40b5e0ef1", "sorting": "3391cf582b5b", "order": "1c7a80f44634", "set": "2f5bbb1d6f94",
    "maths": "fa4255ab71e0", "images": "1ec03922187f", "fig-6": "9aa0d03ab49c", "dual-lm": "f41e3c761947",
}
# fmt: on
"""Figure -> a hash of the names and digests of its runs at the scale of its paper."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure", PAPER)
def test_runs_at_paper_scale_stay_the_papers(figure):
    text = " ".join(f"{run.name} {digest(run)}" for run in runs_of(figure, "paper"))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == PAPER[figure]


@pytest.mark.parametrize("figure", [name for name in STUDIES if FIGURES[name].paper in (DUAL, LANGUAGE)])
def test_models_that_are_compared_have_equal_parameters_and_steps(figure):
    paper = FIGURES[figure].paper
    reference = "dual" if paper is DUAL else "softmax"
    compared = defaultdict(list)
    for run in runs_of(figure, "small"):
        task = replace(run.task, split_seed=0) if hasattr(run.task, "split_seed") else run.task
        compared[task, run.model.dim].append(run)
    for runs in some(compared.values()):
        assert len({(run.train.steps, run.train.batch_size, run.train.lr) for run in runs}) == 1
        expected = size(next(run.model for run in runs if paper.row_of(run) == reference))
        assert all(abs(size(run.model) - expected) <= CLOSE * expected for run in runs)


def test_a_run_is_named_after_its_model():
    run = replace(runs_of("table-a1", "smoke")[0], name="fuzzy-16-70-hyla-linear-0")
    assert HYLA.row_of(run) == "hyla-linear"
    with pytest.raises(ValueError, match=r"^row_of: the name of mine-0 ends with none of the models of dual attention"):
        DUAL.row_of(replace(run, name="mine-0"))


def test_a_scale_that_a_figure_lacks_and_an_unknown_model_are_one_clear_line():
    without = [name for name in STUDIES if name not in SHORT]
    assert default_scale("fig-2c") == "short"
    assert {default_scale(name) for name in (*without, "table-a1")} == {"small"}
    for name in without:
        with pytest.raises(ValueError, match=r"^recipes: .*scale 'short'.*choose from paper, small, smoke"):
            STUDIES[name]("short")
    with pytest.raises(ValueError, match=r"recipes: unknown model 'hylla'; did you mean 'hyla'"):
        tiny("fuzzy", "hylla")


# ------------------------------------------------------------------------------------------------------------- training
def tiny(task_name, row):
    shape = {"fuzzy": FUZZY, "sraven": SRAVEN}[task_name]["smoke"]
    task = fuzzy_task("smoke", 0, length=8) if task_name == "fuzzy" else sraven_task("smoke", 0)
    return make(task, row, shape, Setting(1e-2, 0.1, 1), 0)


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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("figure", ["games", "maths", "images", "sorting", "lm-bytes"])
def test_every_model_of_a_study_trains(figure, tmp_path):
    first_of_row = {FIGURES[figure].paper.row_of(run): run for run in reversed(runs_of(figure, "smoke"))}
    for row, run in some(first_of_row.items()):
        train = replace(run.train, steps=2, eval_batches=1)
        result = training.run(replace(run, folder=str(tmp_path / row), device="cpu", train=train), progress=False)
        assert result.steps == 2, row
        assert result.parameters == parameters(run.model), row
        assert set(result.scores) == set(run.train.evaluate), row


# ------------------------------------------------------------------------------------------------------- single recipes
DIGESTS = {"softmax": "eee924c77022", "linear": "2eb112607e74", "hyla": "5f8501a8d358"}
"""Of runs whose fields are the paper's."""


@pytest.mark.parametrize("row", DIGESTS)
def test_fuzzy_logic_as_in_the_paper_and_as_in_its_code(row):
    recipe = RECIPES[f"fuzzy-{row}"]
    paper, short, original = recipe("paper"), recipe(), recipe("original")
    assert (paper.name, digest(paper)) == (f"fuzzy-{row}", DIGESTS[row])
    assert replace(paper, train=replace(paper.train, steps=15_000, eval_batches=32, eval_every=2500)) == short
    decay = ph.Decay(qkv_biases=True, relative_bias=True)
    assert original.train == replace(paper.train, decay=decay, early_floor=True)
    assert original.model == replace(paper.model, dropout=0.1, dropout_shared=True)
    assert original.task == replace(paper.task, split="legacy")


@pytest.mark.parametrize(
    ("name", "study"),
    [("games-dual", "games"), ("sorting-dual", "sorting"), ("digits-dual", "images"), ("maths-dual", "maths")]
    + [(f"lm-{row}", "lm-bytes") for row in ("softmax", "hyla", "dual", "disentangled", "linear")],
)
def test_single_recipes_are_runs_of_the_studies(name, study):
    run = RECIPES[name]()
    assert (run.name, run.threads) == (name, None)
    matching = []
    for candidate in runs_of(study, "small"):
        if replace(candidate, train=run.train, name=name, threads=None) == run:
            matching.append(candidate)
    (same,) = matching
    assert replace(same.train, steps=run.train.steps) == run.train
    assert (same.train.steps == run.train.steps) == (name not in ("digits-dual", "maths-dual"))
