"""`polyhead demo`: two experiments in about two minutes, drawn in the terminal as they run, and one page."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyhead.cli.output import write
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polyhead.papers.demo import Curve, Score

PAGE = "demo.html"
RACE_FILE = "race.json"
BARS = " ▁▂▃▄▅▆▇█"

RACE = """\
1 of 2, about {seconds:.0f} seconds. A game with pictures: do the outer two of three shapes match, while the middle one
differs? Each network trains on 1,000 pictures of one family of shapes. The score is accuracy on new shapes."""
FUZZY = """\
2 of 2, about {seconds:.0f} seconds. Fuzzy logic: find a function in 31 examples and apply it. The networks were trained
before, for 50,000 steps. They are scored now on functions whose two parts they know. Five divisions of the functions
into known and unseen combinations."""
LONG = """\
Long training, about ten minutes: HYLA and softmax heads on fuzzy logic, 12,500 of 50,000 steps."""


def demo(
    folder: Path = Path("runs/demo"), seeds: int = 3, workers: int = min(os.cpu_count() or 1, 8), long: bool = False
) -> int:
    """Watch four kinds of heads learn to compare shapes, score trained models, and get one page of both.

    examples:
      polyhead demo
      polyhead demo --long        # trains HYLA and softmax heads for ten minutes, too
      polyhead demo --seeds 1     # one network for each kind of heads: faster

    Args:
        folder: Where the page and the finished networks' scores are written.
        seeds: Networks of each kind of heads in the race.
        workers: Processes that train networks of the race.
        long: Train HYLA and softmax heads on fuzzy logic afterwards.
    """
    from polyhead.papers import demo as experiments

    check_number("demo", "--seeds", seeds, 1)
    check_number("demo", "--workers", workers, 1)
    folder.mkdir(parents=True, exist_ok=True)
    curves = run_race(folder / RACE_FILE, seeds, workers)
    scores = score_models()
    page = folder / PAGE
    page.write_text(experiments.page(curves, scores), encoding="utf-8")
    print_scores(curves, scores)
    write(f"\nThe page with both pictures: {page.resolve().as_uri()}")
    if not long:
        return 0
    return train_long(folder)


# ---------------------------------------------------------------------------------------------------------------------
# The race


def run_race(file: Path, num_seeds: int, num_workers: int) -> dict[str, dict[str, "Curve"]]:
    """Train the networks that `file` does not have yet, in several processes, and draw their scores as they grow.

    Returns racer -> seed -> its curve.  `file` gets each finished network, so a demo that was stopped goes on.
    """
    from polyhead.papers import demo

    finished = _read_race(file)
    curves: dict[str, dict[str, Curve]] = {racer: {} for racer in demo.RACERS}
    waiting = []
    for seed in range(num_seeds):
        for racer in demo.RACERS:
            curve = finished.get(racer, {}).get(str(seed), [])
            curves[racer][str(seed)] = curve
            if not curve:
                waiting.append((racer, seed))

    seconds = _seconds_per_network() * len(waiting) / min(num_workers, len(waiting) or 1)
    print(RACE.format(seconds=seconds), file=sys.stderr, flush=True)
    if not waiting:
        print(f"The race is the one of an earlier demo; to see it run, delete {file}.", file=sys.stderr, flush=True)
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    with context.Manager() as manager, LiveText() as live:
        messages = manager.Queue()
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            futures = [pool.submit(_train_racer, racer, seed, messages) for racer, seed in waiting]
            remaining = len(futures)
            while remaining:
                racer, seed, step, accuracy = messages.get()
                if racer is None:  # a network is finished, or failed
                    remaining -= 1
                    continue
                curves[racer][str(seed)].append((step, accuracy))
                if step == demo.RACE_STEPS:
                    # Only whole curves are stored: the next demo would take half a curve for a finished network.
                    complete = {name: _complete(by_seed) for name, by_seed in curves.items()}
                    file.write_text(json.dumps(complete), encoding="utf-8")
                live.show(race_board(curves))
            for future in as_completed(futures):
                future.result()  # raises what ended a worker
        live.show(race_board(curves), final=True)
    return curves


def _read_race(file: Path) -> dict[str, dict[str, "Curve"]]:
    """The networks that an earlier demo finished, or nothing if there is no such file or it is not one of ours."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return stored


def _complete(by_seed: dict[str, "Curve"]) -> dict[str, "Curve"]:
    from polyhead.papers.demo import RACE_STEPS

    return {seed: curve for seed, curve in by_seed.items() if curve and curve[-1][0] == RACE_STEPS}


def _train_racer(racer: str, seed: int, messages: Any) -> None:
    """In a worker: train one network and send (racer, seed, step, accuracy); at the end (None, seed, 0, 0)."""
    import torch

    from polyhead.papers import demo

    torch.set_num_threads(1)
    # The end is sent also after an error: the parent counts ends, and would wait for ever for a missing one.
    try:
        for step, accuracy in demo.race(racer, seed):
            messages.put((racer, seed, step, accuracy))
    finally:
        messages.put((None, seed, 0, 0.0))


def _seconds_per_network(num_steps: int = 8) -> float:
    """An estimate from a few steps of the slowest racer on one thread, and two seconds to start."""
    import torch

    from polyhead.papers import demo

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in demo.race("softmax + relational", 0, steps=1):  # the first steps are slower
        pass
    start = time.perf_counter()
    for _ in demo.race("softmax + relational", 0, steps=num_steps):
        pass
    seconds = time.perf_counter() - start
    torch.set_num_threads(num_threads)
    return 2.0 + seconds / (num_steps + 1) * demo.RACE_STEPS


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
        longest = max((len(curve) for curve in by_seed.values()), default=0)
        means = []
        for i in range(longest):
            means.append(fmean(curve[i][1] for curve in by_seed.values() if len(curve) > i))
        bars = "".join(_bar(mean) for mean in means)
        latest = [curve[-1][1] for curve in by_seed.values() if curve]
        if latest:
            board.add_row(racer, bars, f"{fmean(latest):.2f}", f"{min(latest):.2f} to {max(latest):.2f}")
        else:
            board.add_row(racer, "waiting", "", "")
    return board


def _bar(accuracy: float) -> str:
    """A bar whose height is the accuracy between guessing (0.5) and 1."""
    height = (accuracy - 0.5) / 0.5 * (len(BARS) - 1)
    return BARS[max(0, min(len(BARS) - 1, round(height)))]


class LiveText:
    """A picture in the terminal that is drawn again in its place; without a terminal its last state is printed once."""

    def __enter__(self) -> "LiveText":
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        if self.console.is_terminal:
            self.live.start()
        return self

    def show(self, picture: "RenderableType", final: bool = False) -> None:
        if final:
            self.live.stop()
            self.console.print(picture)
        elif self.console.is_terminal:
            self.live.update(picture, refresh=True)

    def __exit__(self, *error: object) -> None:
        self.live.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Trained models on fuzzy logic


def score_models() -> list["Score"]:
    """Scores of the trained models and baselines; none, with one line, where the models are not on this machine."""
    from rich.console import Console
    from rich.progress import Progress

    from polyhead.papers import demo

    if not demo.trained_models_are_here():
        print("\n2 of 2 is left out: it needs the folder models/ of the repository", file=sys.stderr)
        return []
    print("\n" + FUZZY.format(seconds=25), file=sys.stderr, flush=True)
    total = len(demo.KINDS) * len(demo.SPLIT_SEEDS)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        return demo.fuzzy_scores(lambda name, number: progress.update(bar, completed=number, description=name))


def print_scores(curves: dict[str, dict[str, "Curve"]], scores: Iterable["Score"]) -> None:
    """The result of both parts, as tables on standard output."""
    from rich.console import Console
    from rich.table import Table

    from polyhead.papers import demo

    race = Table("heads", "accuracy on new shapes", "range", title="between: after 600 steps", title_justify="left")
    for racer, by_seed in curves.items():
        last = [curve[-1][1] for curve in by_seed.values()]
        race.add_row(racer, f"{fmean(last):.3f}", f"{min(last):.3f} to {max(last):.3f}")
    console = Console()
    console.print(race)
    table = Table("heads or baseline", *demo.SPLITS.values(), title="fuzzy logic: R², mean of five divisions")
    by_label: dict[str, dict[str, str]] = {}
    for score in scores:
        by_label.setdefault(score.label, {})[score.split] = f"{score.mean:.3f}"
    for label, cells in by_label.items():
        table.add_row(label, *(cells[split] for split in demo.SPLITS))
    if by_label:
        console.print(table)


def train_long(folder: Path) -> int:
    """Train HYLA and softmax heads on fuzzy logic for ten minutes and write their report."""
    from polyhead.cli.train import write_failures
    from polyhead.pages import report
    from polyhead.papers import demo
    from polyhead.scale.sweep.jobs import sweep
    from polyhead.train import Result

    print("\n" + LONG, file=sys.stderr, flush=True)
    outcomes = sweep(demo.long_runs(), folder / "long")
    folders = [outcome.folder for outcome in outcomes if isinstance(outcome, Result)]
    if len(folders) < len(outcomes):
        return write_failures(outcomes)
    path = report.write(folders, folder / "long.html", title="polyhead demo")
    write(f"\nThe report of the long training: {path}")
    return 0
