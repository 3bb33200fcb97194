"""What `polyhead demo` runs: a race of heads on a relational game, and trained models scored on fuzzy logic.

The race is the first example of the README with 600 steps: the game *between*, four kinds of heads, several seeds.  The
trained models are those of the main test of docs/results/protocol.md: five splits, three kinds of heads.
"""

import itertools
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyhead.analysis.labels import mechanism_label
from polyhead.config import Disentangled, Mechanism, Relational, Rotary, Softmax, TransformerConfig
from polyhead.models.transformer import Transformer
from polyhead.pages.document import figure_as_svg, render
from polyhead.tasks import FuzzyLogic, RelationalGames
from polyhead.train import shipped
from polyhead.train.evaluation import evaluate
from polyhead.train.store.checkpoint import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAME = "between"
RACERS = ("softmax", "softmax, rotary positions", "softmax + relational", "softmax + disentangled")
# Training steps of a network of the race, and how often it is scored.
RACE_STEPS, RACE_EVERY = 600, 25
GUESSING = 0.5

FUZZY = FuzzyLogic()  # names the splits and baselines
SPLITS = ("iid", "compositional")
SPLIT_SEEDS = (1, 2, 3, 4, 5)
KINDS = {kind: mechanism_label(kind) for kind in ("hyla", "softmax", "linear")}
BASELINES = {name: FUZZY.words.baselines[name].label for name in ("mix", "gaussian_process")}

# Colour and marker of a racer.
STYLES = {
    "softmax": ("#0072b2", "D"),
    "softmax, rotary positions": ("#56a5d9", "^"),
    "softmax + relational": ("#009e73", "s"),
    "softmax + disentangled": ("#d55e00", "o"),
}

# (step, accuracy on new shapes), in the order of training.
Curve = list[tuple[int, float]]
# Kind of heads or baseline, split of fuzzy logic -> R² for each division of the functions.
Scores = dict[tuple[str, str], list[float]]


def race_model(racer: str, task: RelationalGames) -> TransformerConfig:
    """The network of a racer: two layers, width 64, four heads."""
    heads: list[Mechanism] = [Softmax(4)]
    if racer == "softmax + relational":
        heads = [Softmax(2), Relational(2)]
    elif racer == "softmax + disentangled":
        heads = [Softmax(2), Disentangled(2)]
    positions = Rotary() if racer == "softmax, rotary positions" else None
    return TransformerConfig(*task.ends, dim=64, layers=2, heads=heads, positions=positions)


def race(racer: str, seed: int) -> Iterator[tuple[int, float]]:
    """Train one network and yield (step, accuracy on 500 images of new shapes) every 25 steps, from step 0 on."""
    torch.manual_seed(seed)
    task = RelationalGames(GAME)
    model = Transformer(race_model(racer, task))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    new_shapes = task.batch("novel", 500, seed=0, step=0)
    for step in range(RACE_STEPS + 1):
        if step % RACE_EVERY == 0:
            with torch.no_grad():
                accuracy = task.metrics(model(new_shapes.inputs), new_shapes)["accuracy"].mean()
            yield step, round(accuracy.item(), 4)
        batch = task.batch("train", 64, seed=0, step=step)
        task.loss(model(batch.inputs), batch).backward()
        optimiser.step()
        optimiser.zero_grad()


def fuzzy_scores(report: Callable[[str, int], None]) -> Scores:
    """R² of the trained models and of two baselines on both splits, computed now.

    Args:
        report: Called with name and number before each of the models.

    Raises:
        ValueError: If the folder `models/` of the repository is not here.
    """
    values: Scores = {}
    for number, seed in enumerate(SPLIT_SEEDS):
        for kind_index, (kind, label) in enumerate(KINDS.items()):
            name = f"fuzzy-{kind}-{seed}"
            report(name, number * len(KINDS) + kind_index)
            run, model = load_model(name)
            for split in SPLITS:
                scores = evaluate(model, run.task, split, batch_size=128, batches=8, seed=run.seed)
                values.setdefault((label, split), []).append(scores["r2"])
        for split in SPLITS:
            task: Any = run.task  # fuzzy logic, which has baselines
            baselines = task.baselines(split, sequences=500)
            for key, label in BASELINES.items():
                values.setdefault((label, split), []).append(baselines[key].mean)
    return values


def trained_models_are_here() -> bool:
    """Whether the trained models of fuzzy logic are on this machine."""
    names = itertools.starmap("fuzzy-{}-{}".format, itertools.product(KINDS, SPLIT_SEEDS))
    return all(map(shipped.at_hand, names))


def draw_race(curves: dict[str, dict[str, Curve]]) -> "Figure":
    """Accuracy on new shapes over training steps: mean and range of the seeds of each racer.

    Args:
        curves: Racer -> seed -> its curve.
    """
    from polyhead.analysis.canvas import FAINT, INK, one_panel

    figure, axes = one_panel(7.2, 2.9)
    for racer in reversed(RACERS):
        by_seed = np.array(list(curves[racer].values()))  # (seed, point, step and accuracy)
        steps, accuracy = by_seed[0, :, 0], by_seed[:, :, 1]
        means = accuracy.mean(0)
        colour, marker = STYLES[racer]
        axes.fill_between(steps, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, lw=0)
        axes.plot(steps, means, color=colour, lw=2, marker=marker, markevery=4, ms=5)
        axes.annotate(racer, (steps[-1], means[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    axes.axhline(GUESSING, color=FAINT, lw=1, ls="--")
    axes.annotate("guessing", (steps[-1], GUESSING), (8, 0), textcoords="offset points", va="center", color=INK)
    axes.set(xlim=(0, steps[-1]), ylim=(0.45, 1.02), xlabel="training steps", ylabel="accuracy, new shapes")
    return figure


def draw_scores(scores: Scores) -> "Figure":
    """R² on the compositional split: a dot for each division of each kind of heads, and two baselines."""
    from polyhead.analysis import figures

    measured = {}
    baselines = {}
    for (label, split), values in scores.items():
        if split == "compositional" and label in KINDS.values():
            measured[label] = values
        elif split == "compositional":
            baselines[label] = fmean(values)
    return figures.results(measured, baselines=baselines, score=f"R² on {FUZZY.split_name('compositional')}")


def page(curves: dict[str, dict[str, Curve]], scores: Scores) -> str:
    """One HTML page that needs nothing else: both pictures, three sentences, and the numbers in tables."""
    num_seeds = len(curves[RACERS[0]])
    networks = "1 network" if num_seeds == 1 else f"{num_seeds} networks"
    race_caption = (
        "The game between: accuracy on shapes that training never showed. "
        f"Mean and range over {networks} of each kind of heads."
    )
    race_rows = []
    for racer, by_seed in curves.items():
        final = np.array(list(by_seed.values()))[:, -1, 1]
        race_rows.append([racer, f"{final.mean():.3f}", ", ".join(map("{:.3f}".format, final))])
    values: dict[str, Any] = {"race": figure_as_svg(draw_race(curves), race_caption, "race"), "race_rows": race_rows}
    values |= {"scores": None, "score_rows": []}
    if scores:
        caption = (
            "Fuzzy logic: combinations that training never had, in five divisions of the functions. "
            "Heads of width 2, as in the paper's released code. "
            "Each network is scored on 1,024 sequences, for the README on 16,000."
        )
        values["scores"] = figure_as_svg(draw_scores(scores), caption, "scores")
        for (label, split), numbers in scores.items():
            values["score_rows"].append([label, FUZZY.split_name(split), f"{fmean(numbers):.3f}"])
    return render("papers/demo.html", values, title="polyhead demo", style="report/report.css").text
