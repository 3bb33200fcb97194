"""Does HYLA compose at the paper's scale?  The long trainings of docs/results/protocol.md: fuzzy logic and SRAVEN.

    nice -n 19 python benchmarks/long_trainings.py train --folder runs/long [--workers 2] [--seeds 1 2 3] [--list]
    nice -n 19 python benchmarks/long_trainings.py train --seeds 1 2 3 --models hyla-linear linear-rms
    nice -n 19 python benchmarks/long_trainings.py train --seeds 0 --models softmax hyla --sraven [--split 2]
    python benchmarks/long_trainings.py draw [runs/long/main/*]

`train`: every seed trains softmax, HYLA and linear for 50,000 steps.  `--models` names others, ablations and other
settings.  Give the same command again to resume: finished runs are skipped, begun ones go on exactly.
`--sraven` is the pilot on SRAVEN: the paper's network and permuted columns, two features in place of four, 40,000 steps
in place of 156,250, and one rate.  `--split`: one split of the rules for all seeds, in place of each seed's own.

`draw` makes the pages of docs/results/fuzzy and docs/results/sraven from all finished runs: `long` has the scores of
the main test, `inside` swaps and probes of its codes, `parts` the ablations, `table` all rows of Table A1, `settings`,
`width`, `equal`, `held-out` and `length` other settings, `sraven` and `splits` Raven matrices.  Without folders it
takes the runs in `models/` and those without weights in docs/results.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from polyhead.config import Run, Train, digest
from polyhead.models.size import parameters
from polyhead.papers.hyla import inside, long
from polyhead.papers.hyla.runs import FUZZY, SRAVEN, SRAVEN_SPLITS, make
from polyhead.papers.outcome import Figure
from polyhead.papers.page import write_all
from polyhead.papers.reproduce import described
from polyhead.papers.sizes import Setting
from polyhead.papers.study import Study
from polyhead.scale.sweep.jobs import sweep
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.train import Interrupted, Result, read_config, read_result, shipped
from polyhead.train.store.checkpoint import checkpoints

MODELS = ("softmax", "hyla", "linear")
ABLATIONS = {"hyla-linear": "hyla", "hyla-norms": "hyla", "linear-rms": "linear", "hyla-softmax": "hyla"}
"""Row of Table A1 -> the model that it changes."""
TABLE_ROWS = {
    "linear-rms-relu": "linear",
    **dict.fromkeys(("hyla-linear-norms", "hyla-deep", "hyla-both"), "hyla"),
    **{f"{row}-moe": row for row in MODELS},
}
"""The other rows of Table A1."""


@dataclass(frozen=True)
class Variant:
    """A row of Table A1 in the setting of the main test, or with another one.

    Attributes:
        width: The width of heads.
        dim: The width of the network, whose MLP is twice as wide.
    """

    row: str
    length: int = 32
    width: int = 2
    dropout: float = 0.0
    decay: float = 0.1
    held_out: float = 0.7
    dim: int = 128


SETTINGS = {
    **{f"length-16-{row}": Variant(row, length=16) for row in MODELS},
    **{f"{row}-width-{width}": Variant(row, width=width) for width in (4, 8, 16) for row in MODELS},
    "softmax-dropout": Variant("softmax", dropout=0.1),
    "softmax-decay": Variant("softmax", decay=1.0),
    **{f"{row}-held-out-{percent}": Variant(row, held_out=percent / 100) for percent in (30, 50) for row in MODELS},
    **{f"equal-{row}-16": Variant(row, dim=173) for row in ("softmax", "hyla")},
}
"""Order 4 of the protocol, and its additions: width of heads, equal parameters, the part held out."""

CHANGED = ABLATIONS | TABLE_ROWS | {name: variant.row for name, variant in SETTINGS.items()}
"""A run beside the main test -> the model that it changes."""

CHOSEN_RATES = {"softmax": 3e-3, "hyla": 3e-3, "linear": 1e-3}
"""What six runs of seed 0 chose (docs/results/fuzzy/rates); other runs take the rate of the model that they change."""
SEEDS = (1, 2, 3, 4, 5, 6)
SPLITS = ("validation", "iid", "compositional", "novel")

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGES = {
    "long": Figure("Fuzzy logic after 50,000 steps", long.LONG, long.draw),
    "inside": Figure("Inside the networks of 50,000 steps: swapped and probed codes", long.LONG, inside.draw),
    "parts": Figure(
        "Which part of HYLA matters: ablations after 50,000 steps", long.LONG, partial(long.draw, tests=long.PARTS)
    ),
    "settings": Figure(
        "Other heads, dropout, decay: fuzzy logic after 50,000 steps", long.LONG, partial(long.draw, tests=long.WIDE)
    ),
    "width": Figure("Width of heads: fuzzy logic after 50,000 steps", long.LONG, long.draw_width),
    "table": Figure("Table A1: fuzzy logic after 50,000 steps", long.LONG, partial(long.draw, tests=long.TABLE)),
    "equal": Figure(
        "Heads of width 2 in a larger network: fuzzy logic after 50,000 steps",
        long.LONG,
        partial(long.draw, tests=long.EQUAL),
    ),
    "held-out": Figure("Part held out: fuzzy logic after 50,000 steps", long.LONG, long.draw_held_out),
    "length": Figure(
        "Fuzzy logic from 15 examples after 50,000 steps", long.LONG, partial(long.draw, tests=long.PRIMARY)
    ),
    "sraven": Figure(
        "Raven matrices with permuted columns after 40,000 steps", long.LONG, partial(long.draw, tests=long.RAVENS)
    ),
    "splits": Figure("Raven matrices: two splits, three initial networks", long.LONG, long.draw_splits),
}
FOLDERS = {"sraven": "sraven", "splits": "sraven/splits"}
"""Page -> its folder, if not the one of its name among those of fuzzy logic."""
SHORT = tuple(name for name, variant in SETTINGS.items() if variant.length != 32)
WIDE = tuple(name for name in SETTINGS if "-width-" in name)
HELD_OUT = tuple(name for name in SETTINGS if "-held-out-" in name)
EQUAL = tuple(name for name in SETTINGS if name.startswith("equal-"))
OTHERS = tuple(name for name in SETTINGS if name not in (*SHORT, *HELD_OUT, *EQUAL))
CHANGED_ROWS = {"parts": tuple(ABLATIONS), "table": tuple(TABLE_ROWS), "settings": OTHERS}
CHANGED_ROWS |= {"width": WIDE, "equal": EQUAL, "held-out": HELD_OUT, "splits": ("sraven-split",)}
"""Page -> the rows that it is about, which it has beside the models that they change."""


# ------------------------------------------------------------------------------------------------------------- training
def training(row: str, seed: int) -> Run:
    """One run: the paper's network, a split of the seed's own, scores on 16,000 sequences a split."""
    variant = SETTINGS.get(row, Variant(row))
    task = FuzzyLogic(
        variables=4, terms=2, length=variant.length, held_out=variant.held_out, split="covered", split_seed=seed
    )
    train = Train(
        steps=50_000,
        lr=CHOSEN_RATES[CHANGED.get(row, row)],
        weight_decay=variant.decay,
        evaluate=SPLITS,
        eval_batches=125,
        eval_every=2500,
        save_every=500,
    )
    shape = replace(FUZZY["paper"], head_dim=variant.width, dim=variant.dim, hidden=2 * variant.dim)
    run = make(task, variant.row, shape, shape.grid()[0], seed)
    return replace(run, name=f"{row}-{seed}", model=replace(run.transformer, dropout=variant.dropout), train=train)


def pilot(row: str, seed: int, split: int | None = None) -> Run:
    """One run on SRAVEN: permuted columns, two features of 8 values, scores on 6,400 instances a split.

    Args:
        split: Which rules are held out; by default a split of the seed's own.
    """
    name = f"sraven-{row}-{seed}"
    if split is None:
        split = seed
    elif split != seed:
        name = f"sraven-split-{split}-{row}-{seed}"
    task = Sraven(features=2, values=8, held_out=0.25, split="covered", split_seed=split)
    run = make(task, row, SRAVEN["paper"], Setting(1e-3, 0.1, 1000), seed)
    train = replace(
        run.train,
        steps=40_000,
        evaluate=SRAVEN_SPLITS,
        eval_batches=50,
        eval_every=2500,
        save_every=500,
        log_every=500,
    )
    return replace(run, name=name, train=train)


def train(options: argparse.Namespace) -> None:
    """Train seed by seed.  Raises RuntimeError if a run failed."""
    named = [(row, seed) for seed in options.seeds for row in options.models]
    if options.sraven:
        runs = tuple(pilot(row, seed, options.split) for row, seed in named)
    else:
        runs = tuple(training(row, seed) for row, seed in named)
    if options.list:
        for run in runs:
            print(f"{run.name:24} {run.train.steps:6} steps  {parameters(run.transformer):7,} parameters")
        return
    folder = options.folder / ("sraven" if options.sraven else "main")
    failed = [outcome for outcome in sweep(runs, folder, workers=options.workers) if not isinstance(outcome, Result)]
    if failed:
        raise RuntimeError(f"long trainings: {len(failed)} of {len(runs)} runs failed, see {folder}")


# -------------------------------------------------------------------------------------------------------------- drawing
def rows_by_digest() -> dict[str, str]:
    """Digest -> row of every run of the protocol; a row of SRAVEN begins with "sraven-"."""
    rows = {}
    for seed in SEEDS:
        for row in (*MODELS, *CHANGED):
            rows[digest(training(row, seed))] = row
    for row, seed in itertools.product(MODELS, (0, *SEEDS)):
        rows[digest(pilot(row, seed))] = f"sraven-{row}"
    for row, seed, split in itertools.product(("softmax", "hyla"), long.NETWORKS, long.TWO_SPLITS):
        if seed != split:
            rows[digest(pilot(row, seed, split))] = "sraven-split"
    return rows


def committed_folders() -> list[Path]:
    """Runs with weights in `models/`, and those without in docs/results."""
    folders = []
    for task in ("fuzzy", "sraven"):
        folders += sorted(shipped.REPOSITORY.glob(f"{task}-*"))
        folders += sorted((RESULTS / task / "runs").glob("*"))
    return folders


def draw(options: argparse.Namespace) -> None:
    """Draw every page that has a finished run of its own."""
    rows = rows_by_digest()
    finished: list[tuple[str, Run, Result]] = []
    for folder in options.folders or committed_folders():
        run, result = read_config(folder), read_result(folder)
        if result is None or digest(run) not in rows:
            reason = "not a run of the protocol" if result else "not finished"
            print(f"left out: {folder}, {reason}")
            continue
        finished.append((rows[digest(run)], replace(run, folder=None), result))

    rows_of_page = {"long": MODELS, "inside": MODELS, "length": SHORT, "sraven": [f"sraven-{row}" for row in MODELS]}
    rows_of_page |= {page: (*MODELS, *changed) for page, changed in CHANGED_ROWS.items()}
    rows_of_page["table"] = (*MODELS, *ABLATIONS, *TABLE_ROWS)
    rows_of_page["splits"] = ("sraven-softmax", "sraven-hyla", "sraven-split")
    rows_there = {row for row, _, _ in finished}
    for page in options.pages:
        pairs = [(run, result) for row, run, result in finished if row in rows_of_page[page]]
        if page == "inside":  # needs weights
            pairs = [(run, result) for run, result in pairs if checkpoints(result.folder)]
        if page in CHANGED_ROWS:  # the others stand beside it with the same seeds
            seeds = {run.seed for row, run, _ in finished if row in CHANGED_ROWS[page]}
            pairs = [(run, result) for run, result in pairs if run.seed in seeds]
        if not pairs or not rows_there.intersection(CHANGED_ROWS.get(page, rows_there)):
            print(f"{page}: no run is finished")
            continue
        folder = options.into / FOLDERS.get(page, f"fuzzy/{page}")
        draw_page(page, folder, [run for run, _ in pairs], [result for _, result in pairs])
    print(f"{len(finished)} of {len(rows)} runs")


def draw_page(name: str, folder: Path, runs: list[Run], results: list[Result]) -> None:
    figure = PAGES[name]
    study = Study.of(name, long.LONG, "paper", folder, runs, results)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = figure.draw(study)
    about = described(figure.title, study, outcome)
    about["command"] = "python benchmarks/long_trainings.py draw"
    path = write_all(folder, about, outcome)
    print(*outcome.verdicts, path, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    trainer = verbs.add_parser("train")
    trainer.add_argument("--folder", type=Path, default=Path("runs/long"))
    trainer.add_argument("--workers", type=int)
    trainer.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    trainer.add_argument("--models", choices=(*MODELS, *CHANGED), nargs="+", default=MODELS)
    trainer.add_argument("--sraven", action="store_true", help="the pilot on SRAVEN in place of fuzzy logic")
    trainer.add_argument("--split", type=int, help="one split of SRAVEN for all seeds")
    trainer.add_argument("--list", action="store_true", help="train nothing: say what would be trained")
    trainer.set_defaults(function=train)
    drawer = verbs.add_parser("draw")
    drawer.add_argument("folders", nargs="*", type=Path)
    drawer.add_argument("--into", type=Path, default=RESULTS)
    drawer.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    drawer.set_defaults(function=draw)
    options = parser.parse_args()
    try:
        options.function(options)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.code)


if __name__ == "__main__":
    main()
