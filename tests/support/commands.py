"""The command line in tests: a run of a moment, what a command prints, and the one line about a mistake."""

import shlex
from dataclasses import replace

import polyhead as ph
from polyhead.cli.dispatch import main


def small(name="small", **changes):
    """Four steps, saved after two."""
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=(ph.Hyla(2),), max_length=6)
    train = ph.Train(steps=4, batch_size=2, warmup=1, eval_batches=1, log_every=1, save_every=2)
    return replace(ph.Run(name=name, task=task, model=model, train=train), **changes)


def ask(capsys, command):
    """What a command prints; it must succeed."""
    code = main(shlex.split(command))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def mistake(capsys, command):
    """The one line that a command prints before it exits with 2."""
    arguments = shlex.split(command) if isinstance(command, str) else command
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("polyhead")
    assert not captured.err.startswith("polyhead: polyhead")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip().removeprefix("polyhead: ")
