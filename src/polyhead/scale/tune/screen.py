"""Progress of a search: a live table on a terminal, else a line when a trial starts and ends."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from polyhead.scale.tune.trial import Outcome, Trial
from polyhead.train.progress import QUIET_SECONDS, wanted
from polyhead.train.store.disk import tell

ROWS = 15
"""How many of the last trials are shown, besides the best."""
SECONDS = 0.5
"""Seconds between two polls of the study."""


class SearchScreen:
    """Shows a search.  `outcome`: returns the current state of the study."""

    def __init__(self, outcome: Callable[[], Outcome], *, enabled: bool) -> None:
        self.outcome, self.enabled = outcome, wanted(enabled)
        console = Console(stderr=True)
        self.live = Live(console=console, auto_refresh=False) if self.enabled and console.is_terminal else None
        self.drawn, self.spoken = 0.0, time.monotonic()

    def __enter__(self) -> "SearchScreen":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live is not None:
            self.live.update(table(self.outcome(), {}), refresh=True)
            self.live.stop()

    def update(self, texts: Mapping[int, str]) -> None:
        """Redraw.  `texts`: the progress of running trials, by number."""
        now = time.monotonic()
        if self.live is not None and now - self.drawn > SECONDS:
            self.drawn = now
            self.live.update(table(self.outcome(), texts), refresh=True)
        elif now - self.spoken > QUIET_SECONDS:
            self.spoken = now
            for number, text in texts.items():
                self.line(f"trial {number}: {text}")

    def line(self, text: str) -> None:
        if self.enabled and self.live is None:
            tell(text)


def table(outcome: Outcome, texts: Mapping[int, str]) -> Table:
    """A table of the last trials and the best."""
    shown = list(outcome.trials[-ROWS:])
    if outcome.best is not None and outcome.best not in shown:
        shown.insert(0, outcome.best)
    cells = rows(outcome, shown, texts)
    found = Table(*(list(cells[0]) if cells else []), title=str(outcome.folder))
    for trial, row in zip(shown, cells, strict=True):
        found.add_row(*map(escape, row.values()), style="bold" if trial is outcome.best else None)
    return found


def rows(outcome: Outcome, trials: Sequence[Trial], texts: Mapping[int, str] | None = None) -> list[dict[str, str]]:
    """A row for each trial: its fields, score and state.  `texts`: what replaces the states of running trials.

    A trial whose proposal was interrupted lacks fields; their cells are empty.
    """
    fields = dict.fromkeys(name for trial in trials for name in trial.values)
    return [
        {
            "trial": str(trial.number),
            **{name: short(trial.values.get(name, "")) for name in fields},
            f"{outcome.split} {outcome.metric}": "" if trial.score is None else f"{trial.score:.4f}",
            "": (texts or {}).get(trial.number) or said(trial, outcome),
        }
        for trial in trials
    ]


def said(trial: Trial, outcome: Outcome) -> str:
    """The state of a trial as text, without its score."""
    if trial is outcome.best:
        return "best"
    return f"{trial.state}: {trial.error}" if trial.error else "" if trial.state == "done" else trial.state


def short(value: object) -> str:
    """
    >>> short(0.00123456), short(64), short(None)
    ('0.00123', '64', 'None')
    """
    return f"{value:.3g}" if isinstance(value, float) else str(value)
