"""The study of dual attention: softmax beside relational heads (Altabaa and Lafferty 2024; Abstractors, Altabaa et al.
2024), as functions that return runs.

Each takes a scale, `small` (two CPU cores, minutes) or `paper`; `polyhead reproduce games --scale small` trains the
runs, or goes on with them, and writes figure, table and verdicts beside the papers' numbers.

All models of a study have as many parameters as dual attention, within 1 % (the width of the feed-forward layers, of
CoRelNet the width, of PrediNet the number of relations, makes it so), and as many optimiser steps.  `scales.py` has the
sizes, `dual_models.py` the models.

At small scale: gradients clipped at 1, a warm-up and a cosine to a tenth of the rate, no dropout, one rate for all.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from polyhead.config import Model, Run, Task
from polyhead.recipes import scales
from polyhead.recipes.dual_models import BY_POSITION, ROWS, Relations, classifier
from polyhead.recipes.scales import Scale, Setting
from polyhead.tasks import RelationalGames
from polyhead.tasks.relational_games import GAMES

GAME_SPLITS = ("validation", "iid", "novel_hexominoes", "novel_stripes")
EXAMPLES: dict[str, dict[str, tuple[int, ...]]] = {
    "paper": {
        **dict.fromkeys(GAMES, (250, 500, 1000, 1500, 2000, 2500)),
        "match_pattern": (5000, 10_000, 15_000, 20_000, 25_000),
    },
    "small": dict.fromkeys(GAMES, (250, 1000)),
    "smoke": dict.fromkeys(GAMES, (16, 32)),
}
"""Sizes of the training sets."""


def games(scale: str = "small") -> tuple[Run, ...]:
    """Relational games, learning curves over the number of training images, nine models, five games.

    polyhead reproduce games.  Paper: 2 layers of width 128, 2 heads (dual attention: 1 + 1, or 2 relational ones), one
    relation per head, symmetric, symbols and learned positions by place, SwiGLU, dropout 0.1, Adam, rate 1e-3 without a
    schedule, 50 epochs of batches of 512, so that steps grow with the images; five trials, pentominoes in training.
    Small: width 64, 600 steps of 64 whatever the number of images, so that data are not confounded with steps; rate
    2e-3; 250 and 1000 images; three seeds, each with training images of its own.

    Where the papers are silent (the alternative in brackets): relation weights start balanced with symbols [as in the
    released package: its own row]; dropout on the code and on what each layer adds [once]; a final norm [none]; the
    mean over the nine patches, without a class token [with].
    """
    shape = scales.size(scale, "games")
    runs = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        for n in EXAMPLES[scale][game]:
            own = replace(shape, steps=50 * -(-n // shape.batch_size)) if scale == "paper" else shape
            task = RelationalGames(game, examples=n, split_seed=seed)
            runs += [game_run(task, row, own, setting, seed) for row in ROWS for setting in own.grid()]
    return tuple(runs)


def game_run(
    task: RelationalGames, row: str, shape: Scale, setting: Setting, seed: int, relations: Relations = BY_POSITION
) -> Run:
    """The run that trains the model `row` on a game."""
    name = f"{task.game}-{task.examples}-{row}-{seed}"
    return _run(name, task, _classifier(task, row, shape, relations), shape, setting, GAME_SPLITS)


def _classifier(task: RelationalGames, row: str, shape: Scale, relations: Relations) -> Model:
    """Models are made once for all training sets: the number of steps is nothing to them."""
    return classifier(task.ends, task.length, row, replace(shape, steps=0), relations)


def _run(name: str, task: Task, model: Model, shape: Scale, setting: Setting, splits: Sequence[str]) -> Run:
    seed = int(name.rpartition("-")[2])
    train = scales.training(shape, setting, tuple(splits))
    return Run(name=name, task=task, model=model, train=train, seed=seed, threads=1)
