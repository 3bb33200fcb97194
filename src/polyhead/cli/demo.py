"""`polyhead demo`: two experiments in about two minutes, drawn in the terminal as they run, and one page."""

import multiprocessing
import os
import queue
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyhead.cli.output import Row, write, write_table
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polyhead.papers.demo import Curve, Scores

PAGE = "demo.html"
BARS = " ▁▂▃▄▅▆▇█"

RACE = """\
1 of 2, a minute or two. A game with pictures: do the outer two of three shapes match, while the middle one differs?
Each network trains on 1,000 pictures of one family of shapes. The score is accuracy on new shapes."""
FUZZY = """\
2 of 2, half a minute. Fuzzy logic: find a function in 31 examples and apply it. The networks were trained before, for
50,000 steps. They are scored now on functions whose two parts they know. Five divisions: each holds out other pairs."""
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
    scores = score_models()
    page = folder / PAGE
    page.write_text(experiments.page(curves, scores), encoding="utf-8")
    print_scores(curves, scores)
    write(f"\nThe page with both pictures: {page.resolve().as_uri()}")
    return 0


# ------------------------------------------------------------------------------------------------------------- the race
def run_race(num_seeds: int, num_workers: int) -> dict[str, dict[str, "Curve"]]:
    """Train the networks in several processes, and draw their scores as they grow: racer -> seed -> its curve."""
    from rich.console import Console
    from rich.live import Live

    from polyhead.papers import demo

    print(RACE, file=sys.stderr, flush=True)
    curves: dict[str, dict[str, Curve]] = {}
    for racer in demo.RACERS:
        curves[racer] = {str(seed): [] for seed in range(num_seeds)}
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    with (
        context.Manager() as manager,
        # Ctrl-C ends the workers, too: they would go on with the networks that wait.
        ProcessPoolExecutor(num_workers, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool,
        Live(race_board(curves), console=Console(stderr=True), auto_refresh=False) as live,
    ):
        scores = manager.Queue()
        futures = []
        for seed in range(num_seeds):
            futures += [pool.submit(_train_racer, racer, seed, scores) for racer in demo.RACERS]
        while not (all(future.done() for future in futures) and scores.empty()):
            try:
                racer, seed, step, accuracy = scores.get(timeout=0.2)
            except queue.Empty:
                continue
            curves[racer][str(seed)].append((step, accuracy))
            live.update(race_board(curves), refresh=True)
        for future in futures:
            future.result()  # raises what ended a worker
    print(file=sys.stderr)  # where there is no terminal, the board does not end its line
    return curves


def _train_racer(racer: str, seed: int, scores: Any) -> None:
    """In a worker: train one network, and send (racer, seed, step, accuracy) as it learns."""
    import torch

    from polyhead.papers import demo

    torch.set_num_threads(1)
    for step, accuracy in demo.race(racer, seed):
        scores.put((racer, seed, step, accuracy))


def race_board(curves: dict[str, dict[str, "Curve"]]) -> "RenderableType":
    """A line for each racer: its mean accuracy over training as bars from 0.5 to 1, and mean and range now."""
    from rich.table import Table

    from polyhead.papers import demo

    board = Table(box=None, pad_edge=False)
    board.add_column("heads")
    board.add_column(f"accuracy on new shapes, step 0 to {demo.RACE_STEPS}; a full bar is 1, none is guessing")
    board.add_column("now", justify="right")
    board.add_column("range")
    for racer, by_seed in curves.items():
        started = list(filter(None, by_seed.values()))
        if not started:
            board.add_row(racer, "waiting", "", "")
            continue
        bars = ""
        for i in range(max(map(len, started))):
            reached = [curve[i][1] for curve in started if len(curve) > i]  # accuracies of networks that are as far
            bars += _bar(fmean(reached))
        latest = [curve[-1][1] for curve in started]
        board.add_row(racer, bars, f"{fmean(latest):.2f}", f"{min(latest):.2f} to {max(latest):.2f}")
    return board


def _bar(accuracy: float) -> str:
    """A bar whose height is the accuracy between guessing (0.5) and 1."""
    height = (accuracy - 0.5) / 0.5 * (len(BARS) - 1)
    return BARS[max(0, min(len(BARS) - 1, round(height)))]


# --------------------------------------------------------------------------------------- trained models on fuzzy logic
def score_models() -> "Scores":
    """Scores of the trained models and baselines; none, with one line, where the models are not on this machine."""
    from rich.console import Console
    from rich.progress import Progress

    from polyhead.papers import demo

    if not demo.trained_models_are_here():
        print(NO_MODELS, file=sys.stderr)
        return {}
    print(FUZZY, file=sys.stderr, flush=True)
    total = len(demo.KINDS) * len(demo.SPLIT_SEEDS)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        return demo.fuzzy_scores(lambda name, number: progress.update(bar, completed=number, description=name))


def print_scores(curves: dict[str, dict[str, "Curve"]], scores: "Scores") -> None:
    """The result of both parts, as tables on standard output."""
    from polyhead.papers import demo

    rows: list[Row] = []
    for racer, by_seed in curves.items():
        last = [curve[-1][1] for curve in by_seed.values()]
        spread = f"{min(last):.3f} to {max(last):.3f}"
        rows.append({"heads": racer, "accuracy on new shapes": fmean(last), "range": spread})
    write_table(f"between: after {demo.RACE_STEPS} steps", rows)
    by_label: dict[str, dict[str, str | float]] = {}
    for (label, split), values in scores.items():
        row = by_label.setdefault(label, {"heads or baseline": label})
        row[demo.FUZZY.split_name(split)] = fmean(values)
    if by_label:
        write_table("fuzzy logic: R², mean of five divisions", list(by_label.values()))
