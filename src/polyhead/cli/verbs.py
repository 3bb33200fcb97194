"""The verbs of the command line: where each is, and a line about it.  A verb is imported when it runs."""

import importlib
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """A verb at `place`, a class or function in a module of polyhead.cli, and its `line` in `polyhead --help`.

    The fields of a class are the options; a function takes the arguments.  The docstring is the help of the verb.
    """

    place: str
    line: str

    def load(self) -> Any:
        """The class or function."""
        module, _, name = self.place.partition(".")
        return getattr(importlib.import_module(f"polyhead.cli.{module}"), name)


VERBS = {
    "demo": Verb("demo.Demo", "Train three kinds of heads on two tasks, watch them, write a report."),
    "train": Verb("train.verb", "Train a recipe or a configuration file, with changed fields."),
    "sweep": Verb("sweep.verb", "Train many runs in parallel, on this machine or a cluster."),
    "reproduce": Verb("reproduce.Reproduce", "Reproduce a figure or table of a paper, and judge its claims."),
    "resume": Verb("runs.Resume", "Resume a run that was stopped or killed."),
    "eval": Verb("runs.Eval", "Score a trained run on the splits of its task."),
    "probe": Verb("runs.Probe", "Predict the parts of a task from the latent code by linear probes."),
    "report": Verb("runs.Report", "Write one HTML page about runs: scores, curves, codes, probes."),
    "compare": Verb("listing.Compare", "Show the settings in which runs differ, and their scores."),
    "table": Verb("listing.Table", "Write runs as a table, for a paper or a program."),
    "explore": Verb("explore.Explore", "Write one HTML page on a text: what each token reads, and its codes."),
    "generate": Verb("generate.Generate", "Continue a text with a trained language model."),
    "list": Verb("listing.List", "List recipes, figures, tasks, mechanisms, impls, models or runs."),
    "completion": Verb("completion.Completion", "Print or install the script that completes commands in a shell."),
}
