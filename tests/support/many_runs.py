"""Twenty-four small runs, their undisturbed results, and their current owners."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

from run_folders import losses

import polyhead as ph
from polyhead.scale.sweep.engines import settings
from polyhead.train.store.claims import LOCK, claimed_by
from polyhead.train.store.folder import read_metrics

STEPS = 300


def many_runs():
    """A grid of seeds and learning rates; a run takes about a second, and saves itself twenty times."""
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=(ph.Hyla(2),), max_length=6, dropout=0.1)
    often = {"log_every": 10, "save_every": 15, "eval_every": 100, "eval_batches": 1}
    trains = [ph.Train(steps=STEPS, batch_size=2, warmup=1, lr=lr, **often) for lr in (1e-3, 3e-3, 1e-2)]
    same = {"name": "small", "task": task, "model": model, "device": "cpu", "threads": 1}
    return [ph.Run(**same, train=train, seed=seed) for seed in range(8) for train in trains]


def working(folder):
    """Runs that a worker has in its hands, past their second checkpoint and far from their end."""
    found = [lock.parent for lock in folder.glob(f"*/{LOCK}")]
    found = [place for place in found if not (place / "result.json").exists() and claimed_by(place) is not None]
    steps = {place: max((row["step"] for row in read_metrics(place)), default=0) for place in found}
    return [place for place, step in steps.items() if 30 <= step <= STEPS // 2]


def process(place):
    """The worker of a run."""
    return int((place / LOCK).read_text().split()[1])


def check_all(runs, outcomes, folder, plain):
    """All runs have results, none was trained twice, and the numbers are those of undisturbed runs."""
    failures = [outcome for outcome in outcomes if not isinstance(outcome, ph.train.Result)]
    assert not failures
    places = [folder / f"{run.name}-{ph.digest(run)}" for run in runs]
    assert [outcome.folder for outcome in outcomes] == places
    assert len(set(places)) == len(runs) == len(list(folder.glob("*/result.json")))
    assert [ph.train.read_result(place) for place in places] == list(outcomes)
    for place in places:
        rows = read_metrics(place)
        told = Counter(row["step"] for row in rows if row["kind"] == "train")
        assert told == dict.fromkeys([1, *range(10, STEPS + 1, 10)], 1)
    subprocess.run([sys.executable, __file__, str(plain)], env=settings(1, os.environ), check=True)
    for outcome in outcomes:
        alone = ph.train.read_result(plain / outcome.folder.name)
        assert alone.scores == outcome.scores
        assert losses(alone.folder) == losses(outcome.folder)


if __name__ == "__main__":  # one after the other, in one process without run-time checks
    for run in many_runs():
        ph.train.run(replace(run, folder=f"{sys.argv[1]}/{run.name}-{ph.digest(run)}"), progress=False)
