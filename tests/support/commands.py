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
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def mistake(capsys, command):
    """The one line that a command prints before it exits with 2."""
    assert main(shlex.split(command) if isinstance(command, str) else command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("polyhead")
    assert not said.err.startswith("polyhead: polyhead")
    assert said.err.count("\n") == 1, said.err
    return said.err.strip().removeprefix("polyhead: ")
