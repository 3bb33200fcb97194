"""The gain in the second half of training, on known and unseen combinations: rows computed by hand."""

import pathlib

import pytest

import polyhead as ph
from polyhead.pages.report import headline as report_text
from polyhead.pages.report.runs import Entry, Group
from polyhead.tasks import FuzzyLogic
from polyhead.train.store.folder import Result

PLACE = pathlib.Path("run")
COURSES = {  # of two seeds: scores after 0, 40, 50, 60 and 100 of 100 steps, known and unseen
    "HYLA": [
        ((-1, 0.1, 0.25, 0.4, 0.8), (-1, 0.1, 0.3, 0.4, 0.5)),
        ((-1, 0.1, 0.35, 0.4, 0.9), (-1, 0.1, 0.1, 0.4, 0.7)),
    ],
    "Softmax": [
        ((-1, 0.1, 0.5, 0.6, 0.6), (-1, 0.1, 0.4, 0.2, 0.1)),
        ((-1, 0.1, 0.5, 0.6, 0.8), (-1, 0.1, 0.2, 0.2, 0.3)),
    ],
}


def groups(steps=(0, 40, 50, 60, 100)):
    task = FuzzyLogic()
    found = []
    for name, seeds in COURSES.items():
        entries = []
        for seed, course in enumerate(seeds):
            run = ph.Run(
                task=task, model=ph.TransformerConfig(*task.ends), name=name, seed=seed, train=ph.Train(steps=100)
            )
            kept = [
                {"kind": "eval", "step": step, "split": split, "r2": score}
                for split, scores in zip(("iid", "compositional"), course, strict=True)
                for step, score in zip((0, 40, 50, 60, 100), scores, strict=True)
                if step in steps
            ]
            scores = {row["split"]: {"r2": row["r2"]} for row in kept if row["step"] == 100}
            result = Result(name, ph.digest(run), 100, 1.0, 10, scores, "", {}, PLACE)
            entries.append(Entry(PLACE, run, tuple(kept), result, ()))
        found.append(Group(name, name.lower(), tuple(entries)))
    return found


def test_from_the_score_at_half_of_the_training_to_its_last():
    rows = report_text.courses(groups())
    assert [row[0] for row in rows] == ["HYLA", "Softmax"]  # the best first, on unseen combinations
    assert rows[0][1:] == pytest.approx((0.3, 0.85, 0.2, 0.6))
    assert rows[1][1:] == pytest.approx((0.5, 0.7, 0.3, 0.2))
    assert report_text.course(groups()) == [
        "In the second half of training HYLA gained 0.550 on known combinations and 0.400 on unseen combinations; "
        "Softmax gained 0.200 on known combinations and lost 0.100 on unseen combinations."
    ]


def test_the_last_score_before_it_stands_in_and_that_before_training_does_not():
    assert report_text.courses(groups((40, 60, 100)))[0][1:] == pytest.approx((0.1, 0.85, 0.1, 0.6))
    (words,) = report_text.course(groups((40, 60, 100)))
    assert words.startswith("After step 40 of training HYLA gained 0.750 on known combinations")
    assert report_text.course(groups((0, 60, 100))) == []


def test_a_lower_error_is_a_gain(monkeypatch):
    monkeypatch.setattr(FuzzyLogic, "better", "lower")
    found = groups()
    (words,) = report_text.course(found)
    assert words.startswith("In the second half of training Softmax lost 0.200 on known combinations and gained 0.100")
    (gap,) = report_text._gap(report_text.ranked(found), report_text.where(found))
    assert gap == "From known to unseen combinations the score rises by −0.500 for Softmax and −0.250 for HYLA."
