"""The command reproduce: a figure or table of a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyhead.cli.options import Device
from polyhead.cli.output import emit, write
from polyhead.cli.train import write_failures

if TYPE_CHECKING:
    from polyhead.scale.sweep import Failure

Figure = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FIGURE")]
Results = Annotated[Path | None, tyro.conf.arg(name="from", metavar="RESULTS")]


def reproduce(
    figure: Figure,
    scale: str | None = None,
    seeds: int | None = None,
    folder: Path | None = None,
    workers: int | None = None,
    device: Device = "auto",
    results: Results = None,
) -> int:
    """Reproduce a figure or table of a paper: train its runs, draw it with the paper's numbers, judge its claims.

    After an interruption, run it again to resume; figures share runs.  The scale small takes minutes to hours.
    The scale short, for fuzzy logic, has the paper's network with 15,000 steps, and takes hours.  The scale paper has
    the paper's settings.  The scale smoke only tests that everything runs.  Costs: `polyhead list figures`.

    examples:
      polyhead reproduce table-a1 --scale small
      polyhead reproduce fig-2c --workers 2
      polyhead reproduce fig-2c --from docs/results/small/fig-2c --folder redrawn

    Args:
        figure: A name from `polyhead list figures`.
        scale: small, short, paper or smoke; None: short for figures of fuzzy logic, small for the others.
        seeds: How many seeds, from 0; None: those of the scale, mostly three.  A verdict takes five.
        folder: The folder for runs and results; None: runs/reproduce/SCALE.
        workers: Runs at a time; None: one per core.
        results: Train nothing: redraw and judge again from this results.json, or its folder.
    """
    from polyhead.papers import reproduce as figures

    failures: Sequence[Failure] = ()
    if results is not None:
        options = {"scale": scale, "seeds": seeds, "workers": workers}
        if device != "auto":
            options["device"] = device
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"polyhead reproduce: --from trains nothing, so --{name} has no effect")
        page, outcome = figures.redraw(results, folder, figure=figure)
    else:
        page, outcome, failures = figures.reproduce(
            figure, scale, folder=folder, workers=workers, device=device, seeds=seeds
        )
    rows = [dict(zip(outcome.head, row, strict=True)) for row in outcome.rows]
    verdicts = list(map(str, outcome.verdicts))

    def show() -> None:
        for verdict in verdicts:
            write(verdict)
        write(f"numbers, pictures and the paper's values: {page}")

    emit({"page": page, "rows": rows, "verdicts": verdicts}, show)
    return write_failures(failures)
