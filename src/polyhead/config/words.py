"""The words of a task: what reports, tables and figures print about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Term = tuple[str, str]
"""A word and its meaning."""

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

    `label` is its name; `does` completes "a predictor that ...".  `by`: what a predictor without relations uses
    instead.  `drawn`: figures show it as a line.  `short`: its name beside a curve, where the key is too long.
    """

    label: str
    does: str
    by: str = ""
    drawn: bool = False
    short: str = ""


@dataclass(frozen=True)
class Parts:
    """For a task that combines parts: the words of a report that searches for these parts in the latent code.

    `name`: the part ("term").  `read`: what a probe decodes.  `maps`: the explanation of a map of {count} codes.
    `compare`: how to compare clusters.  `terms`: entries of the glossary.
    """

    name: str
    read: str
    maps: str
    compare: str = ""
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Words:
    """The words of a task.

    `splits`: names of splits ("new shapes"), if the usual ones are not clear.  `question`: what a sample asks
    ("Are they a set?").  `metric`: the main metric and
    its meaning.  `baselines`: by their names in `task.baselines`.  `views`: descriptions of the lists of `task.pairs`.
    `terms`: further entries of the glossary.  `parts`: for a task that combines parts."""

    splits: Mapping[str, str] = field(default_factory=dict)
    question: str = "Answer"
    metric: Term | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    terms: tuple[Term, ...] = ()
    parts: Parts | None = None
