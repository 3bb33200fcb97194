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


def test_what_needs_no_relation_stands_beside_objects(study_of, monkeypatch):
    """In pictures, and in the table below the models: means over the splits of the seeds."""
    study = study_of("sorting", score)
    pictures = []
    monkeypatch.setattr(shared.figures, "lines", lambda panels, **_: pictures.append(panels))
    outcome = draw(study)
    ((panel,),) = pictures
    _, _, levels = panel
    tasks = dict.fromkeys(point.run.task for point in study.points)
    most_examples = max(task.examples for task in tasks)
    tasks = [task for task in tasks if task.examples == most_examples]
    means = [task.baselines("iid", sequences=60, seed=seed)["known_objects"].mean for seed, task in enumerate(tasks)]
    label = tasks[0].words.baselines["known_objects"].label
    assert levels[label][most_examples] == pytest.approx(sum(means) / len(means))
    assert f"{levels[label][most_examples]:.3f}" in "".join([row for row in outcome.rows if label in row][-1])


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("figure", "failed"),
    [
        *itertools.product(("games", "sorting", "order", "set", "maths", "images"), ("dual", "softmax")),
        *((figure, "corelnet") for figure in ("games", "order", "set")),  # the others have none
    ],
)
def test_a_model_whose_runs_failed_is_not_compared(figure, failed, study_of):
    study = study_of(figure, score)
    longer_labels = r" \+|, disentangled|, RCA|, package"
    pattern = re.compile(rf"{ROWS[failed].label}(?!{longer_labels})", re.IGNORECASE)

    def mentions(outcome):
        parts = [part.name for verdict in outcome.verdicts for part in verdict.parts]
        subjects = [verdict.claim.removeprefix("on unseen shapes, too, ") for verdict in outcome.verdicts]
        return [name for name in parts if pattern.search(name)] + [claim for claim in subjects if pattern.match(claim)]

    outcome = draw(without(study, lambda run: DUAL.row_of(run) == failed))
    assert outcome.rows
    assert not mentions(outcome)
    assert mentions(draw(study))


@pytest.mark.parametrize("figure", ["games", "maths", "sorting"])
def test_a_setting_whose_runs_failed_is_not_compared(figure, study_of):
    """Of relational games the others are compared, among them the same game with more images."""
    study = study_of(figure, score)
    settings = [axes_of(point.run) for point in study.points]
    failed = next(axes for axes in settings if figure != "games" or axes[0] == "between")
    remaining = without(study, lambda run: DUAL.row_of(run) == "dual" and axes_of(run) == failed)
    before, after = draw(study).verdicts, draw(remaining).verdicts
    assert before
    if figure == "games":
        assert after
        assert any("between" in str(verdict) for verdict in before)
        assert not any("between" in str(verdict) for verdict in after)
    else:
        assert after == ()


def axes_of(run):
    return [getattr(run.task, axis, None) for axis in ("game", "module", "examples")]
