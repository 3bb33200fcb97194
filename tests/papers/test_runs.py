"""The runs of every figure: names, digests and splits; models that are compared are alike in all else."""

import functools
from collections import defaultdict
from dataclasses import replace

import pytest
from some import some

import polyhead as ph
from polyhead.config import digest
from polyhead.models.size import parameters
from polyhead.papers.dual.models import CLOSE, DUAL
from polyhead.papers.language.models import LANGUAGE
from polyhead.papers.recipes import FIGURES, STUDIES

OWN = {recipe: name for name, recipe in STUDIES.items()}.values()
"""One figure for each set of runs."""


@functools.cache
def runs_of(figure, scale):
    return STUDIES[figure](scale)


size = functools.cache(parameters)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure", OWN)
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
    named = {}
    for figure in OWN:
        for run in runs_of(figure, "small"):
            assert named.setdefault(digest(run), run.name) == run.name


FREE = ("split",)
"""Figures about another number of parameters."""


@pytest.mark.parametrize("figure", [name for name in STUDIES if FIGURES[name].paper in (DUAL, LANGUAGE)])
def test_models_that_are_compared_have_equal_parameters_and_steps(figure):
    paper = FIGURES[figure].paper
    reference = "dual" if paper is DUAL else "softmax"
    alike = defaultdict(list)
    for run in runs_of(figure, "small"):
        task = replace(run.task, split_seed=0) if hasattr(run.task, "split_seed") else run.task
        alike[task, run.model.dim].append(run)
    for same in some(alike.values()):
        assert len({(run.train.steps, run.train.batch_size) for run in same}) == 1
        assert figure == "norms" or len({run.train.lr for run in same}) == 1
        if figure not in FREE:
            wanted = size(next(run.model for run in same if paper.row_of(run) == reference))
            assert all(abs(size(run.model) - wanted) <= CLOSE * wanted for run in same)


@pytest.mark.parametrize(
    ("figure", "heads", "said"),
    [
        ("fig-5c", [ph.Softmax(2), ph.Softmax(2)], "row_of: sraven-2-5-25-hyla-0 is none of the models of Table A1"),
        ("games", [ph.Hyla(2)], "row_of: same-32-dual-0 is none of the models of the study"),
        ("lm-bytes", [ph.Disentangled(8)], "row_of: bytes-softmax-0 is none of the language models of the studies"),
    ],
)
def test_a_model_of_no_row_and_an_unknown_scale_are_one_line(figure, heads, said):
    run = runs_of(figure, "smoke")[0]
    with pytest.raises(ValueError, match=f"^{said}$"):
        FIGURES[figure].paper.row_of(replace(run, model=replace(run.model, heads=heads)))
    with pytest.raises(ValueError, match=r"^recipes: unknown scale 'tiny'.*choose from paper, "):
        STUDIES[figure]("tiny")
