"""The verb reproduce: a figure or table of a paper, by one command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyhead.cli.output import emit
from polyhead.cli.parse import Device
from polyhead.cli.train import failed

if TYPE_CHECKING:
    from polyhead.scale.sweep import Failure


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of a paper: train its runs, draw it with the paper's numbers, judge its claims.

    After an interruption, run it again to resume; figures share runs.  --scale small takes minutes on two CPU cores.
    short (fuzzy logic only) has the paper's network and rate with 15,000 steps, and takes hours.  paper has the paper's
    settings.  smoke only tests that everything runs.  Costs: `polyhead list figures`.

    >>> polyhead reproduce table-a1 --scale small
    >>> polyhead reproduce fig-2c --workers 2
    >>> polyhead reproduce fig-2c --from docs/results/small/fig-2c --folder redrawn
    """

    figure: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FIGURE")]
    """A name from `polyhead list figures`."""
    scale: str | None = None
    """small, short, paper or smoke (default: short for the figures of fuzzy logic, small for the others)."""
    seeds: int | None = None
    """How many seeds, from 0 (default: those of the scale, mostly three).  A verdict takes five."""
    published: Path | None = None
    """The folder with the published files of relational games or mathematics, in place of generated data."""
    folder: Path | None = None
    """The folder for runs and results (default: runs/reproduce/SCALE)."""
    workers: int | None = None
    """Runs at a time (default: one per core)."""
    device: Device = "auto"
    results: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RESULTS")] = None
    """Train nothing: redraw and judge again from this results.json, or its folder."""

    def __call__(self) -> int:
        from polyhead.cli.text import table
        from polyhead.papers.redraw import redraw
        from polyhead.papers.reproduce import reproduce

        failures: Sequence[Failure] = ()
        if self.results is not None:
            given = [n for n in ("scale", "seeds", "published", "workers") if getattr(self, n) is not None]
            given += ["device"] * (self.device != "auto")
            if given:
                raise ValueError(f"polyhead reproduce: --from trains nothing, so --{given[0]} has no effect")
            page, outcome = redraw(self.results, self.folder, figure=self.figure)
        else:
            page, outcome, failures = reproduce(
                self.figure, self.scale, folder=self.folder, workers=self.workers, device=self.device,
                seeds=self.seeds, published=self.published,
            )  # fmt: skip
        rows = [dict(zip(outcome.head, row, strict=True)) for row in outcome.rows]

        def show() -> None:
            if rows:
                table(self.figure, rows)
            for verdict in outcome.verdicts:
                print(verdict)
            print(f"page: {page}")

        emit(lambda: {"page": page, "rows": rows, "verdicts": [str(one) for one in outcome.verdicts]}, show)
        return failed(failures)
