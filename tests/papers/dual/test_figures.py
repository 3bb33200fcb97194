"""The figures of dual attention: baselines, and claims whose runs failed.

Their claims, tables and numbers are those of docs/results: test_redraw.py.
"""

import itertools
import re

import pytest
from drawn import draw, quick, scores, without  # noqa: F401 (a fixture)

from polyhead.papers.dual import shared
from polyhead.papers.dual.models import DUAL, ROWS

score = scores({"dual": 0.2, "relational": 0.15, "corelnet": 0.3, "abstractor": 0.1, "disentangled": 0.05})


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("figure", "split", "name"),
    [
        ("sorting", "iid", "known_objects"),
        ("order", "validation", "known_objects"),
        ("set", "validation", "known_pairs"),
    ],
)
def test_what_needs_no_relation_stands_beside_objects(figure, split, name, study_of, monkeypatch):
    """In pictures, and in the table below the models: means over the splits of the seeds."""
    study = study_of(figure, score)
    pictures = []
    monkeypatch.setattr(shared.figures, "lines", lambda panels, **_: pictures.append(panels))
    found = draw(study)
    (((_, _, levels),),) = pictures
    tasks = dict.fromkeys(point.run.task for point in study.points)
    most = max(one.examples or 0 for one in tasks)
    tasks = [one for one in tasks if most in (0, one.examples)]
    means = [one.baselines(split, sequences=60, seed=seed)[name].mean for seed, one in enumerate(tasks)]
    label = study.points[0].run.task.words.baselines[name].label
    level = levels[label][most] if figure == "sorting" else levels[label]
    assert level == pytest.approx(sum(means) / len(means))
    assert f"{level:.3f}" in "".join([row for row in found.rows if label in row][-1])


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("figure", "lost"),
    [
        *itertools.product(("games", "sorting", "order", "set", "maths", "images"), ("dual", "softmax")),
        *((figure, "corelnet") for figure in ("games", "order", "set")),  # the others have none
    ],
)
def test_a_model_whose_runs_failed_is_not_compared(figure, lost, study_of):
    study = study_of(figure, score)
    rest = without(study, lambda run: DUAL.row_of(run) == lost)
    assert len(rest.points) < len(study.points)
    found = draw(rest)
    assert found.rows
    named = re.compile(rf"{ROWS[lost].label}(?! \+|, disentangled|, RCA|, package)", re.IGNORECASE)  # no longer label
    parts = [part.name for verdict in found.verdicts for part in verdict.parts]
    subjects = [verdict.claim.removeprefix("on unseen shapes, too, ") for verdict in found.verdicts]
    assert not [name for name in parts if named.search(name)] + [claim for claim in subjects if named.match(claim)]


@pytest.mark.parametrize("figure", ["games", "maths", "sorting"])
def test_a_place_whose_runs_failed_is_not_compared(figure, study_of):
    """Of relational games the others are compared, among them the same game with more images."""
    study = study_of(figure, score)
    first = next(at for at in map(place, (p.run for p in study.points)) if figure != "games" or at[0] == "between")
    rest = without(study, lambda run: DUAL.row_of(run) == "dual" and place(run) == first)
    verdicts = draw(rest).verdicts
    assert not [verdict for verdict in verdicts if figure != "games" or "between" in str(verdict)]
    assert bool(verdicts) == (figure == "games")


def place(run):
    return [getattr(run.task, axis, None) for axis in ("game", "module", "examples")]
