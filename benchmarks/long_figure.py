"""The figures and the tests of the long trainings, from all of their runs that are finished.

    python benchmarks/long_figure.py [runs/long/main/*]       draws the pages of docs/results/fuzzy and sraven anew

`long` has the scores of the main test, `inside` what swaps and probes of their codes show, `parts` the ablations,
`settings` and `length` other heads, dropout, decay and fewer examples, `sraven` the runs on SRAVEN.  Without folders it
takes the runs that `ship_models.py` has put into `models/`, and those without weights in `docs/results/sraven/runs` and
`docs/results/fuzzy/runs`, which `inside` leaves out.  It names the other folders that it leaves out: unfinished runs,
and runs that are not of the protocol.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from long_trainings import ABLATIONS, CHANGED, MODELS, SEEDS, SETTINGS, pilot, training
from polyhead.config import Run, digest
from polyhead.papers.figure import Figure
from polyhead.papers.hyla import inside, long
from polyhead.papers.hyla.sizes import HYLA
from polyhead.papers.reproduce import described, written
from polyhead.papers.study import Study
from polyhead.train import Result, read_config, read_result
from polyhead.train.store import shipped
from polyhead.train.store.checkpoint import checkpoints

PLACE = Path(__file__).parents[1] / "docs" / "results"
PAGES = {
    "long": Figure("Fuzzy logic after 50,000 steps", HYLA, long.draw),
    "inside": Figure("Inside the networks of 50,000 steps: swapped and probed codes", HYLA, inside.draw),
    "parts": Figure("Which part of HYLA matters: ablations after 50,000 steps", HYLA, long.draw_parts),
    "settings": Figure("Other heads, dropout, decay: fuzzy logic after 50,000 steps", HYLA, long.draw_settings),
    "width": Figure("Width of heads: fuzzy logic after 50,000 steps", HYLA, long.draw_width),
    "length": Figure("Fuzzy logic from 15 examples after 50,000 steps", HYLA, long.draw_length),
    "sraven": Figure("Raven matrices with permuted columns after 40,000 steps", HYLA, long.draw_ravens),
}
RATES = {"softmax": 3e-3, "hyla": 3e-3, "linear": 1e-3}
"""Chosen before the runs: see docs/results/protocol.md.  Other runs take that of the model that they change."""

SHORT = tuple(name for name, variant in SETTINGS.items() if variant.length != 32)
WIDE = tuple(name for name in SETTINGS if "-width-" in name)
BESIDE = {"parts": tuple(ABLATIONS), "settings": tuple(name for name in SETTINGS if name not in SHORT), "width": WIDE}
"""Page -> the rows that it is about, which it has beside the models that they change."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, default=PLACE)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    given = parser.parse_args()
    rates = RATES | {row: RATES[changed] for row, changed in CHANGED.items()}
    wanted = {digest(training(row, seed, rates[row])): row for row in rates for seed in SEEDS}
    wanted |= {digest(pilot(row, seed)): f"sraven-{row}" for row in MODELS for seed in (0, *SEEDS)}
    of = {"long": MODELS, "inside": MODELS, "length": SHORT, "sraven": tuple(f"sraven-{row}" for row in MODELS)}
    of |= {name: (*MODELS, *rows) for name, rows in BESIDE.items()}
    finished: list[tuple[str, Run, Result]] = []
    weights = [folder for task in ("fuzzy", "sraven") for folder in sorted(shipped.REPOSITORY.glob(f"{task}-*"))]
    kept = [*weights, *(folder for task in ("sraven", "fuzzy") for folder in sorted((PLACE / task / "runs").glob("*")))]
    for folder in given.folders or kept:
        run, result = read_config(folder), read_result(folder)
        if result is None or digest(run) not in wanted:
            print(f"left out: {folder}, {'not a run of the protocol' if result else 'not finished'}")
            continue
        finished.append((wanted[digest(run)], replace(run, folder=None), result))
    there = {row for row, _, _ in finished}
    for name in given.pages:
        mine = [(run, result) for row, run, result in finished if row in of[name]]
        if name == "inside":
            mine = [(run, result) for run, result in mine if checkpoints(result.folder)]
        if not mine or (name in BESIDE and not there & set(BESIDE[name])):
            print(f"{name}: no run is finished")
            continue
        into = given.into / name if name == "sraven" else given.into / "fuzzy" / name
        page(name, PAGES[name], into, [run for run, _ in mine], [result for _, result in mine])
    print(f"{len(finished)} of {len(wanted)} runs")


def page(name: str, known: Figure, into: Path, runs: list[Run], results: list[Result]) -> None:
    """Draw one page."""
    study = Study.of(name, HYLA, "paper", into, runs, results)
    if name in BESIDE:
        study = long.beside_changed(study, BESIDE[name])
    into.mkdir(parents=True, exist_ok=True)
    outcome = known.draw(study)
    about = described(name, known, "paper", study, outcome) | {"command": "python benchmarks/long_figure.py"}
    path = written(into, known.title, about, outcome)
    print(*outcome.verdicts, path, sep="\n")


if __name__ == "__main__":
    main()
