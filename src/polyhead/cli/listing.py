"""The verbs list, compare and table: show recipes, mechanisms, runs and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyhead.cli.output import emit
from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.cli.text import Row
    from polyhead.scale.records import Records

KINDS = ("recipes", "figures", "tasks", "mechanisms", "impls", "runs", "models")
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]


@dataclass(frozen=True)
class List:
    """List recipes, figures, tasks, mechanisms, impls, trained models, or the runs in a folder.

    >>> polyhead list recipes
    >>> polyhead list runs
    >>> polyhead list mechanisms --dim 512 --heads 8 --length 1024
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """recipes, figures, tasks, mechanisms, impls, runs or models."""
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")] = ()
    """For runs: folders to search, at any depth (default: runs)."""
    dim: int | None = None
    """For mechanisms: the model width for the numbers (default: 128)."""
    heads: int | None = None
    """For mechanisms: heads in a layer (default: 8)."""
    length: int | None = None
    """For mechanisms: tokens in a sequence (default: 256)."""

    def __call__(self) -> int:
        from polyhead.cli import text as cli_text

        what = one_of("polyhead list", "kind", self.what, KINDS)
        sizes = {name: value for name in ("dim", "heads", "length") if (value := getattr(self, name)) is not None}
        if sizes and what != "mechanisms":
            raise ValueError(f"polyhead list: --{next(iter(sizes))} is for mechanisms but {what} were asked for")
        if self.folders and what != "runs":
            raise ValueError(f"polyhead list: a folder is for runs but {what} were asked for")
        if what == "runs":
            from polyhead.scale.records import records

            found = records(*self.folders, who="list runs")
            emit(found.rows, lambda: show(found, "Runs", folders=True))
        elif what == "mechanisms":
            sizes = {"dim": 128, "heads": 8, "length": 256} | sizes
            rows, legend = cli_text.mechanisms(sizes["dim"], sizes["heads"], sizes["length"])
            emit(lambda: rows, lambda: _listed(what, rows, legend))
        else:
            rows = getattr(cli_text, what)()
            legends = {"recipes": cli_text.RECIPES, "figures": cli_text.FIGURES, "models": cli_text.MODELS}
            emit(lambda: rows, lambda: _listed(what, rows, legends.get(what, "")))
        return 0


def _listed(what: str, rows: Sequence["Row"], legend: str) -> None:
    from polyhead.cli import text as cli_text

    cli_text.table(what.capitalize(), rows)
    if what == "recipes":
        cli_text.table("", cli_text.families())
    print(legend, end="\n" * bool(legend))


@dataclass(frozen=True)
class Compare:
    """Show the settings in which runs differ, and their scores side by side; for two runs also the difference.

    >>> polyhead compare runs/fuzzy-softmax-0a1b2c3d4e5f runs/fuzzy-hyla-1a2b3c4d5e6f
    """

    runs: Runs
    """At least two run folders; a folder of runs means all of them."""

    def __call__(self) -> int:
        from polyhead.cli.text import table
        from polyhead.scale.records import Records, records

        found = records(*self.runs, who="compare") if self.runs else ()
        if not isinstance(found, Records) or len(found) < 2:
            raise ValueError(f"compare: two runs were wanted but {len(found) or 'none'} came")
        emit(found.rows, lambda: table("Settings and scores", found.differences()))
        return 0


@dataclass(frozen=True)
class Table:
    """Write runs as a table, for a paper or a program; the best score of each split is marked.

    csv and json have every setting and score with all digits; md and latex have rounded scores for readers.

    >>> polyhead table runs/grid
    >>> polyhead table runs/grid --format latex --out grid.tex
    """

    runs: Runs
    """Run folders, or folders with runs."""
    format: str = "md"
    """md, csv, latex or json."""
    out: Path | None = None
    """A file (default: standard output)."""

    def __call__(self) -> int:
        from polyhead.scale.records import records
        from polyhead.train.store.files import check_place

        if self.out is not None:
            check_place("table", self.out, renamed=False)
        found = records(*self.runs, who="table")
        text = found.text(self.format)
        if self.out is None:
            emit(found.rows, lambda: print(text, end=""))
        else:
            self.out.write_text(text, encoding="utf-8")
            emit(lambda: {"table": str(self.out)}, lambda: print(f"table: {self.out}"))
        return 0


def show(found: "Records", title: str, *, folders: bool = False) -> None:
    """A row for each run: its distinguishing settings, state, scores, folder, and error if it failed."""
    from polyhead.cli.text import table

    failures = any(record.detail for record in found)
    rows = [
        {**cells, "folder": str(record.folder) if folders else record.folder.name}
        | ({"": record.detail} if failures else {})
        for record, cells in zip(found, found.cells(states=True), strict=True)
    ]
    table(f"{title} (* best, mean ± standard error)" if found.best() else title, rows)
