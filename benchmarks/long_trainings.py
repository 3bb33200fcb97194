"""The long trainings of docs/results/protocol.md: fuzzy logic at the paper's scale, in the order written there; SRAVEN.

    nice -n 19 python benchmarks/long_trainings.py --folder runs/long [--workers 2] [--seeds 1 2 3] [--list]
    nice -n 19 python benchmarks/long_trainings.py --folder runs/long --seeds 1 2 3 --models hyla-linear linear-rms
    nice -n 19 python benchmarks/long_trainings.py --folder runs/long --seeds 0 --models softmax hyla --sraven

First six runs of 5,000 steps of seed 0 choose each model's rate by R² on `validation`, then every seed trains softmax,
HYLA and linear for 50,000 steps.  `--models` names others, ablations and other settings: they take the rate of the
model that they change.  Give the same command again to resume: finished runs are skipped, begun ones continue exactly.

`--sraven` is the pilot on SRAVEN: the paper's network and permuted columns, two features in place of four, 40,000 steps
in place of 156,250, and one rate.
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from polyhead.config import Run, Train
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.hyla.singles import fuzzy_model
from polyhead.papers.hyla.sizes import SRAVEN, SRAVEN_SPLITS, make
from polyhead.papers.sizes import Setting
from polyhead.scale.sweep import jobs as sweep
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.train.store.folder import Result

MODELS = ("softmax", "hyla", "linear")
ABLATIONS = {"hyla-linear": "hyla", "hyla-norms": "hyla", "linear-rms": "linear", "hyla-softmax": "hyla"}
"""Row of Table A1 -> the model that it changes."""


@dataclass(frozen=True)
class Variant:
    """A row of Table A1 in the setting of the main test, or with another length, width of heads, dropout or decay."""

    row: str
    length: int = 32
    width: int = 2
    dropout: float = 0.0
    decay: float = 0.1


SETTINGS = {
    **{f"length-16-{row}": Variant(row, length=16) for row in MODELS},
    **{f"{row}-width-{width}": Variant(row, width=width) for width in (4, 8, 16) for row in MODELS},
    "softmax-dropout": Variant("softmax", dropout=0.1),
    "softmax-decay": Variant("softmax", decay=1.0),
}
"""Order 4 of the protocol, and its addition on the width of heads."""

CHANGED = ABLATIONS | {name: variant.row for name, variant in SETTINGS.items()}
"""A run beside the main test -> the model that it changes."""

RATES = (1e-3, 3e-3)
SEEDS = (1, 2, 3, 4, 5, 6)
TIE = 0.005  # of R²: within it the lower rate is taken
SPLITS = ("validation", "iid", "compositional", "novel")


def training(row: str, seed: int, lr: float, *, steps: int = 50_000, every: int = 2500) -> Run:
    """One run: the paper's network, a split of the seed's own, scores on 16,000 sequences a split."""
    own = SETTINGS.get(row, Variant(row))
    task = FuzzyLogic(variables=4, terms=2, length=own.length, held_out=0.7, split="covered", split_seed=seed)
    train = Train(
        steps=steps, lr=lr, weight_decay=own.decay, evaluate=SPLITS, eval_batches=125, eval_every=every, save_every=500
    )
    model = replace(fuzzy_model(task, ROWS[own.row].sized(8, own.width), dim=128, hidden=256), dropout=own.dropout)
    return Run(name=f"{row}-{seed}", task=task, model=model, train=train, seed=seed, threads=1)


def pilot(row: str, seed: int) -> Run:
    """One run on SRAVEN: permuted columns, 2 features of 8 values, scores on 6,400 instances a split."""
    task = Sraven(features=2, values=8, held_out=0.25, split="covered", split_seed=seed)
    run = make(task, row, SRAVEN["paper"], Setting(1e-3, 0.1, 1000), seed)
    train = replace(
        run.train, steps=40_000, evaluate=SRAVEN_SPLITS, eval_batches=50, eval_every=2500, save_every=500, log_every=500
    )
    return replace(run, name=f"sraven-{row}-{seed}", train=train)


def choices() -> tuple[Run, ...]:
    """The runs that choose the rates: scored once, at their end, and on `validation` alone."""
    runs = []
    for row, lr in itertools.product(MODELS, RATES):
        run = training(row, 0, lr, steps=5000, every=5000)
        runs.append(replace(run, name=f"{row}-rate-{lr:g}", train=replace(run.train, evaluate=("validation",))))
    return tuple(runs)


def chosen(scores: dict[float, float]) -> float:
    """The rate with the higher R² on `validation`; the lower rate if they are within `TIE`."""
    low, high = sorted(scores)
    return high if scores[high] - scores[low] > TIE else low


def rates(folder: Path, workers: int | None) -> dict[str, float]:
    """The chosen rate of every model.  RuntimeError: a run failed."""
    found: dict[str, dict[float, float]] = {row: {} for row in MODELS}
    for run, result in zip(choices(), _train(choices(), folder, workers), strict=True):
        row = run.name.partition("-rate-")[0]
        found[row][run.train.lr] = result.scores["validation"]["r2"]
    return {row: chosen(scores) for row, scores in found.items()}


def _train(runs: tuple[Run, ...], folder: Path, workers: int | None) -> list[Result]:
    outcomes = sweep.sweep(runs, folder, workers=workers, threads=1)
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    if len(results) < len(runs):
        raise RuntimeError(f"long trainings: {len(runs) - len(results)} of {len(runs)} runs failed, see {folder}")
    return results


def main() -> None:
    """Choose the rates, then train seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/long"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--models", choices=(*MODELS, *CHANGED), nargs="+", default=MODELS)
    parser.add_argument("--sraven", action="store_true", help="the pilot on SRAVEN in place of fuzzy logic")
    parser.add_argument("--list", action="store_true", help="train nothing: say what would be trained")
    given = parser.parse_args()
    asked = [(row, seed) for seed in given.seeds for row in given.models]
    if given.sraven and set(given.models) & set(SETTINGS):
        parser.error(f"--sraven has softmax, hyla, linear and ablations, not {', '.join(SETTINGS)}")
    pilots = tuple(pilot(row, seed) for row, seed in asked) if given.sraven else ()
    if given.list:
        for run in pilots or (*choices(), *(training(row, seed, 1e-3) for row, seed in asked)):
            print(f"{run.name:20} {run.train.steps:6} steps")
        return
    if pilots:
        _train(pilots, given.folder / "sraven", given.workers)
        return
    lrs = rates(given.folder / "rates", given.workers)
    print("learning rates:", ", ".join(f"{row} {lr:g}" for row, lr in lrs.items()))
    main = tuple(training(row, seed, lrs[CHANGED.get(row, row)]) for row, seed in asked)
    _train(main, given.folder / "main", given.workers)


if __name__ == "__main__":
    main()
