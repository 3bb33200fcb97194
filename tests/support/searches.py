"""Searches with fake workers that end at once."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fake_workers import Fake, Handle

import polyhead as ph
from polyhead.scale.tune import search as tune
from polyhead.train.store.folder import Metrics, Result, read_config, write_result

SPACE = {"train.lr": "1e-4:1e-1:log", "model.layers": "1:4", "train.precision": "fp32,bf16"}


def tiny(**changes: Any) -> ph.Run:
    """A run that trains in a moment."""
    task = ph.tasks.FuzzyLogic(length=8)
    model = ph.TransformerConfig(*task.ends, dim=16, layers=1, heads=(ph.Softmax(2),), max_length=8)
    train = ph.Train(steps=20, batch_size=4, eval_every=5, evaluate=("iid", "validation"), eval_batches=1)
    return ph.Run(task=task, model=model, name="tiny", train=dataclasses.replace(train, **changes), device="cpu")


def score(run: ph.Run) -> float:
    """What the fake worker finds: best at a rate of 1e-2."""
    return 1 - (math.log10(run.train.lr) + 2) ** 2 - 0.1 * run.transformer.layers


def worked(run: ph.Run, folder: pathlib.Path) -> Iterator[int | None]:
    """A worker that writes the rows of one evaluation before each poll, and at the end the result."""
    rows, train = Metrics(folder, lambda row: True), run.train
    try:
        for step in range(train.eval_every, train.steps + 1, train.eval_every):
            found = score(run) * step / train.steps
            rows.add({"kind": "eval", "step": step, "split": "iid", "loss": 0.0, "r2": 7.0})
            rows.add({"kind": "eval", "step": step, "split": "validation", "loss": 0.0, "r2": found})
            yield None
    finally:
        rows.close()
    scores = {"iid": {"r2": 7.0}, "validation": {"r2": score(run)}}
    write_result(Result(run.name, ph.digest(run), train.steps, 0.1, 1, scores, "", {}, folder))
    yield 0


def finish(run: ph.Run, folder: pathlib.Path) -> int:
    """The same at once."""
    return next(code for code in worked(run, folder) if code is not None)


class Engine(Fake):
    """`work`: what a worker does, to its exit code; or to the answers of its polls."""

    work: Callable[[ph.Run, pathlib.Path], Any] = staticmethod(finish)
    started: list[str]
    handles: list[Handle]

    def start(self, folders: Sequence[pathlib.Path]) -> list[Any]:
        Engine.started += [folder.name for folder in folders]
        polls = [Engine.work(read_config(folder), folder) for folder in folders]
        found = [Handle(iter([poll]) if isinstance(poll, int) else poll) for poll in polls]
        Engine.handles += found
        return found

    def stop(self, handles: Any) -> str:
        return "stopped and saved"


def install(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """Searches of this test use these workers."""
    monkeypatch.setattr(Engine, "started", [], raising=False)
    monkeypatch.setattr(Engine, "handles", [], raising=False)
    monkeypatch.setattr(Engine, "work", staticmethod(finish))
    monkeypatch.setattr(tune, "Local", Engine)
    return Engine


def search(folder: pathlib.Path, run: ph.Run | None = None, **options: Any) -> tune.Outcome:
    asked = {"trials": 8, "progress": False, **options}
    space = asked.pop("space", SPACE)
    return tune.tune(run or tiny(), space, folder=folder, **asked)


def facts(outcome: tune.Outcome) -> list[Any]:
    return [(t.number, t.state, t.values, t.score, t.folder and t.folder.name) for t in outcome.trials]
