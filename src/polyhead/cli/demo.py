"""`polyhead demo`: two experiments in about two minutes, and one page of both."""

import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from polyhead.cli.output import write, write_table
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.papers.demo import Curve, Scores

PAGE = "demo.html"

RACE = """\
1 of 2, a minute or two. A game with pictures: do the outer two of three shapes match, while the middle one differs?
Each network trains on 1,000 pictures of one family of shapes. The score is accuracy on new shapes; guessing has 0.5."""
FUZZY = """\
2 of 2, half a minute. Fuzzy logic: find a function in 31 examples and apply it. The networks were trained before, for
50,000 steps. They are scored now on functions whose two parts they know. Five divisions of the functions into known and
unseen combinations."""
NO_MODELS = "2 of 2 is left out: it needs the folder models/ of the repository"


def demo(folder: Path = Path("runs/demo"), seeds: int = 3, workers: int = min(os.cpu_count() or 1, 8)) -> int:
    """Watch four kinds of heads learn to compare shapes, score trained models, and get one page of both.

    examples:
      polyhead demo
      polyhead demo --seeds 1     # one network for each kind of heads: faster

    Args:
        folder: Where the page is written.
        seeds: Networks of each kind of heads in the race.
        workers: Processes that train networks of the race.
    """
    from polyhead.papers import demo as experiments

    check_number("demo", "--seeds", seeds, 1)
    check_number("demo", "--workers", workers, 1)
    folder.mkdir(parents=True, exist_ok=True)
    curves = run_race(seeds, workers)
    scores: Scores = {}
    if experiments.trained_models_are_here():
        print(FUZZY, file=sys.stderr, flush=True)
        scores = experiments.fuzzy_scores()
    else:
        print(NO_MODELS, file=sys.stderr)
    page = folder / PAGE
    page.write_text(experiments.page(curves, scores), encoding="utf-8")
    print_scores(curves, scores)
    write(f"\nThe page with both pictures: {page.resolve().as_uri()}")
    return 0


def run_race(num_seeds: int, num_workers: int) -> dict[str, dict[str, "Curve"]]:
    """Train the networks in several processes, with a line when one has ended: racer -> seed -> its curve."""
    from polyhead.papers import demo

    print(RACE, file=sys.stderr, flush=True)
    curves: dict[str, dict[str, Curve]] = {racer: {} for racer in demo.RACERS}
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    # Ctrl-C ends the workers, too: they would go on with the networks that wait.
    with ProcessPoolExecutor(num_workers, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        futures = {}
        for seed in range(num_seeds):
            for racer in demo.RACERS:
                futures[pool.submit(_train_racer, racer, seed)] = racer, seed
        for future in as_completed(futures):
            racer, seed = futures[future]
            curves[racer][str(seed)] = future.result()  # raises what ended a worker
            print(f"{racer}, network {seed + 1}: {future.result()[-1][1]:.2f}", file=sys.stderr, flush=True)
    return curves


def _train_racer(racer: str, seed: int) -> "Curve":
    """In a worker: train one network; return its accuracy as it learned."""
    import torch

    from polyhead.papers import demo

    torch.set_num_threads(1)
    return list(demo.race(racer, seed))


def print_scores(curves: dict[str, dict[str, "Curve"]], scores: "Scores") -> None:
    """The result of both parts, as tables on standard output."""
    from polyhead.papers import demo

    rows = []
    for racer, by_seed in curves.items():
        last = [curve[-1][1] for curve in by_seed.values()]
        spread = f"{min(last):.3f} to {max(last):.3f}"
        rows.append({"heads": racer, "accuracy on new shapes": fmean(last), "range": spread})
    write_table(f"between: after {demo.RACE_STEPS} steps", rows)
    by_label: dict[str, dict[str, str | float]] = {}
    for (label, split), values in scores.items():
        row = by_label.setdefault(label, {"heads or baseline": label})
        row[demo.SPLITS[split]] = fmean(values)
    if by_label:
        write_table("fuzzy logic: R², mean of five divisions", list(by_label.values()))
