"""What a task tells its readers: the words that reports, tables and figures print about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Term = tuple[str, str]
"""A word and its meaning."""


@dataclass(frozen=True)
class Floor:
    """A score that takes no training.

    `label` is its name, and `does` completes "a predictor that ...".  `by` says what a predictor without relations uses
    instead of them.  `drawn`: figures of the papers show it.
    """

    label: str
    does: str
    by: str = ""
    drawn: bool = False


@dataclass(frozen=True)
class Parts:
    """Of a task that combines parts: what a report says where it looks for these parts in the latent code.

    `name` is the part ("term"), `read` what a probe reads, `maps` the explanation of a map of {count} codes.  `compare`
    adds how to compare clusters.  `terms` are entries of the glossary.
    """

    name: str
    read: str
    maps: str
    compare: str = ""
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Words:
    """`splits`: what a split shows where its name does not say it ("unseen shapes").  `metric`: the headline metric and
    its meaning.  `floors`: by their names in `task.floors`.  `views`: what the lists of `task.pairs` are.  `terms`:
    further entries of the glossary.  `parts`: of a task that combines parts."""

    splits: Mapping[str, str] = field(default_factory=dict)
    metric: Term | None = None
    floors: Mapping[str, Floor] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    terms: tuple[Term, ...] = ()
    parts: Parts | None = None
