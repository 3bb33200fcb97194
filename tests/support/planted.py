"""A finished run without training: its results are planted."""

import json

from polyhead.config import digest
from polyhead.tasks.record import RECORD
from polyhead.train.store.folder import METRICS, Result


def finished(run, folder, scores, courses, losses=(), text=""):
    """`run` in a folder inside `folder`, with its `scores` at the end.

    Args:
        courses: Split -> step -> scores by metric.
        losses: Those of training, step by step.
        text: The fingerprint of the run's text.
    """
    run_folder = folder / f"{run.name}-{digest(run)}"
    run_folder.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    for split, course in courses.items():
        rows += [{"kind": "eval", "step": step, "split": split, **values} for step, values in course.items()]
    (run_folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if text:
        (run_folder / RECORD).write_text(json.dumps({"fingerprint": text}))
    about = {"seconds": 120.0, "parameters": 10, "command": "", "environment": {"device": "cpu"}}
    return Result(name=run.name, digest=digest(run), steps=run.train.steps, scores=scores, folder=run_folder, **about)
