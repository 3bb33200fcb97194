"""A run that trains in a fraction of a second, with dropout and every kind of parameter, and ways to interrupt it."""

import dataclasses
import functools
import os
import signal

import pytest

import polyhead as ph
from polyhead.train import Interrupted, run as train


def tiny(folder, **changes):
    """Twelve steps; saved after 5 and 10.  `changes`: fields of Train, of the model, or of the run."""
    task = ph.tasks.FuzzyLogic(length=8)
    parts = {"heads": (ph.Softmax(2), ph.Hyla(2)), "feedforward": ph.Mlp(24), "positions": ph.RelativeBias()}
    parts |= {"bias": True, "dropout": 0.2, "residual_dropout": 0.1, "init": "hyla"}
    model = ph.TransformerConfig(*task.ends, dim=16, layers=2, max_length=8, **parts)
    train = ph.Train(steps=12, batch_size=4, warmup=3, log_every=1, eval_every=6, save_every=5, eval_batches=2)
    run = ph.Run(name="tiny", task=task, model=model, train=train, seed=7, folder=str(folder), device="cpu", threads=1)
    for part, old in (("train", train), ("model", model)):
        fields = {f.name: changes.pop(f.name) for f in dataclasses.fields(old) if f.name in changes}
        changes[part] = dataclasses.replace(changes.get(part, old), **fields)
    return dataclasses.replace(run, **changes)


@pytest.fixture(name="tiny", scope="session")
def _tiny():
    return tiny


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run that others are compared with."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny(folder), progress=False)
    return folder


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory):
    """Stopped at step 11: checkpoints of steps 11 and 10."""
    folder = tmp_path_factory.mktemp("begun")
    interrupted(tiny(folder), 11)
    return folder


def before_batch(patch, kind, step, action):
    """Call `action`, once, before training draws batch number `step` (from 0) of a task of this kind."""
    draw, waiting = kind.batch, [action]

    def batch(task, split, size, **options):
        if (
            split == "train" and size > 1 and options["step"] == step and waiting
        ):  # one is drawn to see that it is there
            waiting.pop()()
        return draw(task, split, size, **options)

    patch.setattr(kind, "batch", batch)


@pytest.fixture
def at_step(monkeypatch):
    return functools.partial(before_batch, monkeypatch, ph.tasks.FuzzyLogic)


def interrupted(run, step, number=signal.SIGINT):
    """Train, or resume, until a signal in step `step` (from 1), after which it is saved; returns the message."""
    with pytest.MonkeyPatch.context() as patch:
        before_batch(patch, type(run.task), step - 1, lambda: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted) as error:
            train(run, progress=False, resume=True)
    return str(error.value)


def crashed(run, step):
    """Train until an error while batch number `step` (from 0) is drawn."""

    def fail():
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        before_batch(patch, type(run.task), step, fail)
        with pytest.raises(RuntimeError, match="power cut"):
            train(run, progress=False)
