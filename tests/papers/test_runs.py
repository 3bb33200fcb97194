"""The runs of every figure: names, digests and splits; models that are compared are alike in all else."""

import functools
from collections import defaultdict
from dataclasses import replace

import pytest
from some import some

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
        assert len({run.train.lr for run in same}) == 1
        wanted = size(next(run.model for run in same if paper.row_of(run) == reference))
        assert all(abs(size(run.model) - wanted) <= CLOSE * wanted for run in same)


def test_a_run_is_named_after_its_model():
    run = replace(runs_of("table-a1", "smoke")[0], name="fuzzy-16-70-hyla-linear-0")
    assert FIGURES["table-a1"].paper.row_of(run) == "hyla-linear"
    with pytest.raises(
        ValueError, match=r"^row_of: the name of mine-0 ends with none of the models of dual attention$"
    ):
        DUAL.row_of(replace(run, name="mine-0"))


@pytest.mark.parametrize("figure", ["fig-5c", "games", "lm-bytes"])
def test_an_unknown_scale_is_one_line(figure):
    with pytest.raises(ValueError, match=r"^recipes: unknown scale 'tiny'.*choose from paper, "):
        STUDIES[figure]("tiny")
