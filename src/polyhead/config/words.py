"""The words of a task: what reports, tables and figures print about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SPLIT_NAMES = {
    "train": "training data",
    "validation": "validation data",
    "iid": "fresh data",
    "compositional": "unseen combinations",
    "novel": "what was never seen in training",
}
"""Names of splits, for tasks that do not name them."""


@dataclass(frozen=True)
class Baseline:
    """A baseline score without training.

    `label` is its name; `does` completes "a predictor that ...".  `drawn`: figures show it as a line.
    """

    label: str
    does: str
    drawn: bool = False


@dataclass(frozen=True)
class Words:
    """The words of a task.

    `splits`: names of splits ("new shapes"), if the usual ones are not clear.  `metric`: the name of the main metric
    and its meaning.  `baselines`: by their names in `task.baselines`.  `part`: what a task combines ("term"), for
    reports on the latent code.
    """

    splits: Mapping[str, str] = field(default_factory=dict)
    metric: tuple[str, str] | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    part: str = "part"
